"""Our ChatML against the models' own templates, and what a bridge promises."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rendering import bridged, render_ids

from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import select_renderer
from palestra.types.messages import ChatMessage, text_message

MODELS = ["tiny-random", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)]
each_model = pytest.mark.parametrize("model", MODELS)


@cache
def both(model: str):
    tokenizer = load_tokenizer(model)
    return tokenizer, select_renderer(tokenizer)


# Letters that tokenizers treat in ways of their own, and anything else that can be encoded.
odd = st.sampled_from(
    [" ", "\n", "\t", "\r", "  ", "\u00a0", "1", "12", "'s", "é", "漢", "👩‍💻", "\u0301", "<", "|>", "\0", ".", " ,"]
)
texts = st.lists(odd | st.text(max_size=6, alphabet=st.characters(exclude_categories=("Cs",))), max_size=5).map("".join)
roles = st.sampled_from(["system", "user", "assistant", "developer"])
# (Results of tools stand in a turn of the user's, also where a template, having no place for tools, has none for that.)
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=5)


def plain(model: str, *bodies: str) -> None:
    """Leave out texts that spell a token of the model's vocabulary of control tokens."""
    tokenizer, _ = both(model)
    assume(not any(token in body for token in tokenizer.get_added_vocab() for body in bodies))


@each_model
@given(conversation=conversations, generation=st.booleans())
def test_our_renderer_gives_what_the_models_template_gives(model, conversation, generation):
    plain(model, *(m["content"] for m in conversation))
    tokenizer, renderer = both(model)
    wanted = tokenizer.apply_chat_template(conversation, add_generation_prompt=generation, return_dict=False)
    assert render_ids(renderer, conversation, add_generation_prompt=generation) == list(wanted)


@each_model
@given(conversation=conversations)
def test_a_longer_conversation_starts_with_the_shorter_one(model, conversation):
    _, renderer = both(model)
    whole = render_ids(renderer, conversation)
    for end in range(1, len(conversation)):
        part = render_ids(renderer, conversation[:end])
        assert whole[: len(part)] == part


@each_model
@given(
    conversation=conversations,
    completion=st.lists(st.integers(0, 255), max_size=8),
    stop=st.sampled_from([0, 1, None]),
    new=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}), min_size=1, max_size=3
    ),
)
def test_a_bridge_starts_with_the_exact_ids_whatever_was_sampled(model, conversation, completion, stop, new):
    tokenizer, renderer = both(model)
    stops = renderer.stop_ids
    completion = [token for token in completion if token not in stops] + (
        [] if stop is None else [stops[stop % len(stops)]]
    )
    assume(completion)
    prompt = render_ids(renderer, conversation, add_generation_prompt=True)
    out = bridged(renderer, prompt, completion, new)
    assert out[: len(prompt) + len(completion)] == prompt + completion
    rest = out[len(prompt) + len(completion) :]
    if stop is None:
        assert rest.pop(0) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    # What follows the reply is what follows it in any full render.
    reply = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    head = render_ids(renderer, reply)
    assert rest == head[-1:] + render_ids(renderer, reply + new, add_generation_prompt=True)[len(head) :]


@each_model
@given(conversation=conversations, reply=texts, new=texts)
def test_a_bridge_is_the_full_render_where_the_reply_tokenises_to_itself(model, conversation, reply, new):
    plain(model, reply, new, *(m["content"] for m in conversation))
    tokenizer, renderer = both(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    completion = [*tokenizer.encode(reply, add_special_tokens=False), end]
    full = [*conversation, {"role": "assistant", "content": reply}, {"role": "user", "content": new}]
    rendered = render_ids(renderer, full, add_generation_prompt=True)
    prompt = render_ids(renderer, conversation, add_generation_prompt=True)
    assume(rendered[: len(prompt) + len(completion)] == prompt + completion)  # "\n" + reply may merge into one token
    assert bridged(renderer, prompt, completion, full[-1:]) == rendered


@each_model
@given(reply=texts)
def test_the_text_of_a_reply_is_what_was_encoded(model, reply):
    plain(model, reply)
    tokenizer, renderer = both(model)
    stop = renderer.stop_ids[0]
    if model != "tiny-random":  # SmolLM2 has no tokens for some bytes and drops them
        assume(all(tokenizer.decode(tokenizer.encode(c, add_special_tokens=False)) == c for c in reply))
    ids = np.array([*tokenizer.encode(reply, add_special_tokens=False), stop], np.int32)
    assume(not reply.lstrip().startswith("<think>"))
    assert renderer.parse(ids, lambda: ids).message == text_message("assistant", reply)


@each_model
@given(
    body=st.lists(
        odd | st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "\ud800"])
    ).map("".join)
)
def test_a_body_never_holds_a_control_token(model, body):
    tokenizer, renderer = both(model)
    prompt = renderer.render((text_message("system", body), text_message("user", body))).ids
    bare = renderer.render((text_message("system", ""), text_message("user", ""))).ids
    for token in tokenizer.all_special_ids:
        assert (prompt == token).sum() == (bare == token).sum()


TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
written = st.builds(
    lambda value, ascii_only, separators: json.dumps(value, ensure_ascii=ascii_only, separators=separators),
    st.dictionaries(texts, json_values, max_size=3),
    st.booleans(),
    st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", "  : ")]),
)


def never():
    raise AssertionError("the prompt was asked for")


@each_model
@given(
    content=st.sampled_from(["", "So.", "\n", " é\n\n"]),
    calls=st.lists(st.tuples(st.sampled_from(["f", "search_files", "漢"]), written), min_size=1, max_size=3),
)
def test_calls_that_were_written_are_read_again_with_the_same_arguments(model, content, calls):
    plain(model, *(arguments for _, arguments in calls))
    tokenizer, renderer = both(model)
    said = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": f"c_{k}", "function": {"name": n, "arguments": a}} for k, (n, a) in enumerate(calls)],
        }
    )
    text = tokenizer.decode(renderer.render((text_message("user", ""), said), TOOLS).ids)
    if model != "tiny-random":
        assume(all(json.dumps(name)[1:-1] in text or name in text for name, _ in calls))
        assume(all(arguments in text for _, arguments in calls))
    reply = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    ids = np.array([*tokenizer.encode(reply, add_special_tokens=False), renderer.stop_ids[0]], np.int32)
    parsed = renderer.parse(ids, never, TOOLS, "c")
    assert parsed.malformed == ()
    assert parsed.message == said


@each_model
@given(data=st.data())
def test_no_ids_are_too_odd_to_be_a_reply(model, data):
    """Ids of no text, of control tokens, of half a tool call, and ids that the tokenizer does not have."""
    tokenizer, renderer = both(model)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        '"',
        "{",
        "[" * 2000,
        "\\u",
        "<think>",
        "\n",
    ]
    part = st.sampled_from(pieces).map(lambda text: tokenizer.encode(text, add_special_tokens=False)) | st.lists(
        st.integers(0, len(tokenizer) + 300), max_size=6
    )
    ids = np.array([token for ids in data.draw(st.lists(part, max_size=12)) for token in ids], np.int32)
    reply = renderer.parse(ids, never, TOOLS)
    assert reply.message.role == "assistant"
    assert all(json.loads(call.function.arguments).__class__ is dict for call in reply.message.tool_calls)
    rest = renderer.extend(never, ids, (reply.message, text_message("user", "so")), TOOLS)
    assert rest is not None
    assert renderer.render((text_message("user", "hi"), reply.message), TOOLS).ids.dtype == np.int32
