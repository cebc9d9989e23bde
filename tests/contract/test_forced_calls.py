"""Forced calls, walked through `llguidance` with tokenizers that have the added tokens of their families."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import ChatMLRenderer, NotInThisFormat, Renderer, ReplyForm

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Łódź", "<tool_call>"]}, "days": {"type": "boolean"}},
                "required": ["town", "days"],
            },
        },
    },
]
MOST = 3
CHATML = {
    "Qwen2.5": ["<tool_call>", "</tool_call>"],
    "Hermes 3": ["<tool_call>", "</tool_call>", "<tools>", "</tools>", "<think>", "</think>"],
    "only opened": ["<tool_call>"],
    "no tags": [],
}
ONE_CALL = ("llama-3", "kimi-k2")  # their templates write one, or number them
PACKAGE = ("qwen3", "qwen3-vl", "deepseek-v3", *ONE_CALL)


def chatml(tags: Sequence[str], special: bool) -> Renderer:
    backend = Tokenizer.from_str(load_tokenizer("tiny-random").backend_tokenizer.to_str())
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    return ChatMLRenderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


def of_the_package(name: str) -> Renderer:
    from conformance import families
    from conformance.stand_in import StandIn

    class Tiny(StandIn):
        def __init__(self, _: Any) -> None:
            super().__init__(load_tokenizer("tiny-random"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "StandIn", Tiny)
        patch.setattr(families, "_loaded", lambda _: None)
        made: Renderer = families._made(name, None)[0]
    return made


RENDERERS: dict[str, Callable[[], Renderer]] = {
    **{name: lambda tags=tags: chatml(tags, False) for name, tags in CHATML.items()},  # type: ignore[misc]
    "special tags": lambda: chatml(CHATML["Qwen2.5"], True),
    **{f"package: {name}": lambda name=name: of_the_package(name) for name in PACKAGE},  # type: ignore[misc]
}
SPACE = b" \t\r\n"


class Walk:
    """A reply that is sampled through a grammar from tokens that a rule prefers."""

    def __init__(self, renderer: Renderer, grammar: str) -> None:
        backend = renderer._tokenizer.backend_tokenizer if hasattr(renderer, "_tokenizer") else None
        backend = backend or renderer.vocabulary._tokenizer.backend_tokenizer
        self.renderer, self.end = renderer, renderer.stop_ids[0]
        self.size = backend.get_vocab_size()
        tokenizer = LLTokenizer(backend.to_str(), n_vocab=self.size, eos_token=self.end)
        self.matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not self.matcher.get_error()

    def sample(self, prefer: Callable[[list[int]], int], most: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < most:
            bits = int.from_bytes(self.matcher.compute_bitmask(), "little")
            assert not self.matcher.get_error(), self.matcher.get_error()[:200]
            ids.append(prefer([token for token in range(self.size) if bits >> token & 1]))
            if ids[-1] == self.end:
                break
            assert self.matcher.consume_token(ids[-1])
        return ids


@cache
def made(name: str) -> Renderer:
    return RENDERERS[name]()


@pytest.fixture(params=RENDERERS)
def renderer(request) -> Renderer:
    return made(request.param)


def spacing(renderer: Renderer) -> Callable[[list[int]], int]:
    """White space wherever it may stand, and the end last: a small model at temperature 0."""
    bytes_of = renderer.vocabulary.bytes_of

    def rank(token: int) -> tuple[bool, bool]:
        data = bytes_of(token)
        return not data or data.strip(SPACE) != b"", token in renderer.stop_ids

    return lambda allowed: min(allowed, key=rank)


def calls_of(renderer: Renderer, ids: Sequence[int], tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    reply = renderer.parse(np.array(ids, np.int32), lambda: np.array([0], np.int32), tools)
    assert reply.malformed == ()
    assert reply.message.text == ""
    return [(call.function.name, json.loads(call.function.arguments)) for call in reply.message.tool_calls]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sampled_is_one_to_the_most_calls_that_are_read_as_such(renderer, seed):
    walk, draw = Walk(renderer, renderer.grammar(ReplyForm(tools=TOOLS, most_calls=MOST))), random.Random(seed)
    ids = walk.sample(draw.choice, 2000)
    assert ids[-1] == walk.end
    calls = calls_of(renderer, ids, TOOLS)
    assert 1 <= len(calls) <= MOST
    wanted: dict[str, Any] = {"stop": {}, "wait": {}}
    for name, arguments in calls:
        if name == "look_up":
            assert arguments["town"] in ("Łódź", "<tool_call>")
            assert isinstance(arguments["days"], bool)
        else:
            assert arguments == wanted[name]


def test_a_reply_has_any_number_of_calls_up_to_the_most(renderer):
    grammar, found = renderer.grammar(ReplyForm(tools=TOOLS[:1], most_calls=MOST)), set()
    for seed in range(12):
        ids = Walk(renderer, grammar).sample(random.Random(seed).choice, 2000)
        found.add(len(calls_of(renderer, ids, TOOLS[:1])))
    one = any(renderer is made(f"package: {name}") for name in ONE_CALL)
    assert found == ({1} if one else {*range(1, MOST + 1)})


@pytest.mark.parametrize("tool", TOOLS[:2], ids=["no parameters", "no properties"])
def test_a_call_without_arguments_has_little_white_space(renderer, tool):
    walk = Walk(renderer, renderer.grammar(ReplyForm(tools=[tool])))
    ids = walk.sample(spacing(renderer), 200)
    assert ids[-1] == walk.end
    assert calls_of(renderer, ids, [tool]) == [(tool["function"]["name"], {})]


OPEN_PATTERN = {"whitespace_pattern": r"\s+", "item_separator": r"\s*,\s*", "key_separator": r"\s*:\s*"}


@pytest.mark.parametrize("options", [{}, {"x-guidance": OPEN_PATTERN}, {"x-guidance": {"whitespace_flexible": True}}])
@pytest.mark.parametrize("tools", [[], TOOLS[:1]], ids=["alone", "beside tools"])
def test_json_of_a_schema_has_little_white_space_at_each_place(options, tools):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"type": "array", "items": {"const": 2}, "maxItems": 2, "minItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    } | options
    renderer = made("no tags")
    walk = Walk(renderer, renderer.grammar(ReplyForm(schema=schema, tools=tools)))
    rank = spacing(renderer)
    (brace,) = renderer.vocabulary.encode("{").tolist()
    ids = walk.sample(lambda allowed: brace if brace in allowed else rank(allowed), 400)
    assert ids[-1] == walk.end
    text = renderer.vocabulary.decode(ids[:-1])
    assert json.loads(text) == {"a": 1, "b": [2, 2]}
    assert max(len(run) for run in "".join(c if c.isspace() else "x" for c in text).split("x")) <= 20


def test_a_wish_for_json_without_white_space_is_kept():
    renderer = made("no tags")
    compact = {"enum": [[1, 2]], "x-guidance": {"whitespace_flexible": False}}
    walk = Walk(renderer, renderer.grammar(ReplyForm(schema=compact)))
    assert renderer.vocabulary.decode(walk.sample(spacing(renderer), 50)[:-1]) == "[1,2]"


@pytest.mark.parametrize("text", ["<tool_call>", "a </tool_call> b", "<|im_end|>", "<|im_start|>user"])
def test_a_text_that_spells_an_added_token_is_written_with_ordinary_ones(text):
    renderer = made("Qwen2.5")
    added = set(renderer.vocabulary.added.values())
    schema = {"const": {text: text}}
    (other,) = renderer.vocabulary.encode("b").tolist()
    for form in (ReplyForm(choices=("b", text)), ReplyForm(schema={"enum": [text]}), ReplyForm(schema=schema)):
        walk = Walk(renderer, renderer.grammar(form))
        ids = walk.sample(lambda allowed: min(allowed, key=lambda t: (t == other and len(allowed) > 1, t)), 200)
        assert ids[-1] == walk.end
        assert added.isdisjoint(ids[:-1])
        assert text in renderer.vocabulary.decode(ids[:-1])


@pytest.mark.parametrize("name", ["qwen3.5", "glm-4.5", "minimax-m2"])
def test_calls_whose_arguments_are_no_json_cant_be_forced(name):
    with pytest.raises(NotInThisFormat):
        of_the_package(name).grammar(ReplyForm(tools=TOOLS))
