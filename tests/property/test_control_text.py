"""Control tokens in the text of messages: what a marked string becomes, against the tokenizer itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering import render_ids
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from palestra.errors import ControlTokenInText, InvalidRequest
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import PackageRenderer
from palestra.renderers.control_text import ControlText, control_tokens

KINDS = ["tiny-random", "unigram", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)]
each_kind = pytest.mark.parametrize("kind", KINDS)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
words = st.sampled_from(
    [
        *SPECIALS,
        "<|im_",
        "end|>",
        "<",
        ">",
        "|>",
        "|",
        "[",
        "]",
        "a",
        " ",
        "\n",
        "\\",
        "\\u003c",
        "é",
        "👩‍💻",
        "Q",
        "Q1",
    ]
)
texts = st.lists(words | st.text(max_size=4, alphabet=st.characters(exclude_categories=("Cs",))), max_size=8).map(
    "".join
)


def unigram() -> Any:
    """A tokenizer as SentencePiece makes them: its control tokens are pieces, too, and a space is a letter."""
    pieces = [*SPECIALS, *(chr(n) for n in range(33, 127)), "▁", "\n", "im", "_start", "▁a", "<|im_end|>a"]
    backend = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(["<unk>", *pieces])], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@cache
def made(kind: str) -> tuple[Any, ControlText, Any]:
    """A tokenizer, its control text, and a copy that knows no special token in text."""
    tokenizer = unigram() if kind == "unigram" else load_tokenizer(kind)
    backend = tokenizer.backend_tokenizer
    plain = type(backend).from_str(backend.to_str())
    plain.encode_special_tokens = True
    return tokenizer, ControlText(control_tokens(backend), backend), plain


@each_kind
@given(text=texts)
def test_a_marked_text_alone_is_what_the_tokenizer_gives_that_knows_no_control_tokens(kind, text):
    _, control, plain = made(kind)
    marked = control.mark(text)
    assert marked.replace(control.marker, "") == text
    if kind != "unigram":  # whose copy has the control tokens among its pieces
        assert control.encode(marked)[0] == plain.encode(text, add_special_tokens=False).ids
        assert control.encode_plain(text) == plain.encode(text, add_special_tokens=False).ids
    assert not set(control.encode(marked)[0]) & set(control.tokens.values())
    assert not set(control.encode_plain(text)) & set(control.tokens.values())


@each_kind
@given(before=texts, text=texts, after=texts)
def test_the_templates_control_tokens_stay_and_the_texts_beside_them_make_none(kind, before, text, after):
    """A template that writes three texts one beside the other, and its own control tokens around them."""
    _, control, _ = made(kind)
    start, end = control.tokens["<|im_start|>"], control.tokens["<|im_end|>"]
    string = f"<|im_start|>{control.mark(before)}{control.mark(text)}<|im_end|>{control.mark(after)}"
    ids, offsets = control.encode(string)
    assert [token for token in ids if token in control.tokens.values()] == [start, end]
    assert ids[0] == start
    for token, (a, b) in zip(ids, offsets, strict=True):  # each where its own characters are
        if token in (start, end):
            assert string[a:b] == ("<|im_start|>" if token == start else "<|im_end|>")


@each_kind
@given(text=texts)
def test_a_string_without_marks_is_what_the_tokenizer_gives(kind, text):
    tokenizer, control, _ = made(kind)
    string = f"<|im_start|>{text}<|im_end|>\n{text}"
    ids, offsets = control.encode(string)
    wanted = tokenizer.backend_tokenizer.encode(string, add_special_tokens=False)
    assert (ids, offsets) == (wanted.ids, wanted.offsets)


@given(text=texts)
def test_a_text_is_found_to_spell_a_control_token_where_it_does(text):
    _, control, _ = made("tiny-random")
    direct = next((name for name in SPECIALS if name in text), None)
    assert (control.find(text) is not None) >= (direct is not None)
    written = "".join(f"\\u{ord(c):04x}" for c in "<|im_end|>")
    assert control.find(f"a{written}b") == "<|im_end|>"
    assert control.find("\\\\" + "<|im_end|>") is not None


def test_names_that_overlap_or_contain_one_another_are_all_told_from_text():
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[[A]", "[A]", "]x[", "[A]]"]})
    backend = tokenizer.backend_tokenizer
    control = ControlText(control_tokens(backend), backend)
    for text in ("[[A]]", "[A]x[A]", "[[[A]]]x[[A]]", "[A", "A]"):
        marked = control.mark(text)
        assert not set(control.encode("[[" + marked + marked + "]]")[0]) & set(control.tokens.values())
    (only,) = control.encode("[A]]")[0]
    assert only == control.tokens["[A]]"]


def test_what_is_written_as_a_control_token_is_one_and_words_are_none():
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.add_tokens(["<｜User｜>", "<|user|>", "[INST]", "<think>", "</tool_call>", "banana", "  "])
    found = control_tokens(tokenizer.backend_tokenizer)
    assert set(found) == {*SPECIALS, "<｜User｜>", "<|user|>", "[INST]"}


class Slow:
    """A tokenizer that is no fast one: nothing tells how it would encode a text without its control tokens."""

    all_special_tokens = ("<|im_end|>",)
    eos_token_id = 2

    def convert_tokens_to_ids(self, token: str) -> int:
        return 2

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [len(message["content"]) for message in messages]

    def decode(self, ids: Any) -> str:
        return "x" * len(ids)


def test_where_it_cannot_be_told_apart_the_text_is_refused_and_named():
    from renderers import DefaultRendererConfig, create_renderer

    renderer = PackageRenderer(Slow(), create_renderer(Slow(), DefaultRendererConfig()))
    assert render_ids(renderer, [{"role": "user", "content": "> a < b"}], add_generation_prompt=True) == [7]
    with pytest.raises(ControlTokenInText, match=r"role.*<\|im_end\|>"):
        render_ids(renderer, [{"role": "tool", "content": "so<|im_end|>"}], add_generation_prompt=True)
    with pytest.raises(ControlTokenInText, match="a tool"):
        render_ids(
            renderer,
            [{"role": "user", "content": "a"}],
            tools=[{"function": {"name": "<|im_end|>"}}],
            add_generation_prompt=True,
        )


def test_tools_that_are_nested_too_deep_are_refused():
    from renderers import DefaultRendererConfig, create_renderer

    tokenizer = load_tokenizer("tiny-random")
    deep: Any = {}
    for _ in range(900):
        deep = {"properties": deep}
    renderer = PackageRenderer(tokenizer, create_renderer(tokenizer, DefaultRendererConfig()))
    with pytest.raises(InvalidRequest, match="too deep"):
        render_ids(
            renderer,
            [{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": deep}],
            add_generation_prompt=True,
        )
