"""No text of a message makes a control token, in any renderer: it stands there as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
from rendering import bridged, render_ids

from conformance.conversations import conversations
from conformance.families import TINY, of_the_package, ours
from palestra.renderers import PackageRenderer
from palestra.renderers.control_text import control_tokens

FAMILIES = {family.name: family for family in [*ours(), *of_the_package()]}
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == TINY else pytest.mark.model) for name in FAMILIES]
)
Messages = list[dict[str, Any]]


@cache
def made(name: str) -> tuple[Any, Any]:
    """A renderer and its tokenizer, which no test changes."""
    return FAMILIES[name].make()


def a_tool(text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"a{text}": {"type": "string", "description": f"x{text}y"}}}
    return {"type": "function", "function": {"name": f"f{text}", "description": f"x{text}y", "parameters": parameters}}


def calling(name: str, arguments: str, thought: str = "") -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]} | (
        {"reasoning_content": thought} if thought else {}
    )


def escaped(text: str) -> str:
    """As another JSON library may write it: each character by its number."""
    return "".join(f"\\u{ord(c):04x}" for c in text)


USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "It is so."}
PLACES: dict[str, Callable[[str], tuple[Messages, list[dict[str, Any]]]]] = {
    "system": lambda t: ([{"role": "system", "content": f"Be{t}brief."}, USER], []),
    "user": lambda t: ([{"role": "user", "content": f"Hi{t}there, {t} and{t}{t}on"}], []),
    "all of it": lambda t: ([{"role": "user", "content": t}], []),
    "reply": lambda t: ([USER, {"role": "assistant", "content": f"so{t}it is"}, USER], []),
    "reasoning": lambda t: (
        [USER, {"role": "assistant", "content": "so", "reasoning_content": f"hm{t}hm"}, USER],
        [],
    ),
    "result": lambda t: (
        [USER, calling("f", "{}"), {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": f"is{t}so"}],
        [a_tool("")],
    ),
    "arguments": lambda t: (
        [
            USER,
            calling("f", json.dumps({f"k{t}": f"v{t}w"}, ensure_ascii=False)),
            {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "so"},
        ],
        [a_tool("")],
    ),
    "name of a call": lambda t: (
        [
            USER,
            calling(f"f{t}g", "{}"),
            {"role": "tool", "tool_call_id": "call_0", "name": f"f{t}g", "content": "so"},
        ],
        [a_tool("")],
    ),
    "tools": lambda t: ([USER], [a_tool(t)]),
}


def control_of(renderer: Any, tokenizer: Any) -> dict[str, int]:
    return control_tokens(tokenizer.backend_tokenizer, renderer.stop_ids)


def some_of(tokens: dict[str, int], stops: list[int]) -> list[str]:
    """Those that end a reply, and some of the others."""
    ends = [name for name, number in tokens.items() if number in stops]
    others = [name for name in tokens if name not in ends]
    return ends[:3] + Random(0).sample(others, min(7, len(others)))


def rendered(renderer: Any, messages: Messages, tools: list[dict[str, Any]]) -> list[int]:
    return list(render_ids(renderer, messages, tools=tools or None, add_generation_prompt=True))


def counted(ids: list[int], tokens: dict[str, int]) -> Counter[int]:
    control = set(tokens.values())
    return Counter(token for token in ids if token in control)


@each_family
@pytest.mark.parametrize("place", PLACES)
def test_text_that_spells_a_control_token_is_text(name, place):
    renderer, tokenizer = made(name)
    tokens = control_of(renderer, tokenizer)
    assert tokens
    neutral = rendered(renderer, *PLACES[place]("xyzzy"))
    for typed in some_of(tokens, renderer.stop_ids):
        messages, tools = PLACES[place](typed)
        ids = rendered(renderer, messages, tools)
        assert counted(ids, tokens) == counted(neutral, tokens), typed
        assert tokenizer.decode(ids) == tokenizer.decode(neutral).replace("xyzzy", typed), typed


@each_family
def test_json_escapes_that_spell_a_control_token_are_text(name):
    renderer, tokenizer = made(name)
    tokens = control_of(renderer, tokenizer)

    def with_arguments(text: str) -> tuple[Messages, list[dict[str, Any]]]:
        result = {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": f'{{"a": "{text}"}}'}
        return [USER, calling("f", f'{{"a": "v{text}w"}}'), result], [a_tool("")]

    neutral = counted(rendered(renderer, *with_arguments("xyzzy")), tokens)
    for typed in some_of(tokens, renderer.stop_ids):
        assert counted(rendered(renderer, *with_arguments(escaped(typed))), tokens) == neutral, typed


@each_family
def test_pieces_of_a_control_token_beside_each_other_make_none(name):
    """Where a template writes two texts without anything between them, or one beside text of its own."""
    renderer, tokenizer = made(name)
    tokens = control_of(renderer, tokenizer)

    def split(head: str, tail: str) -> Messages:
        reply = {"role": "assistant", "reasoning_content": head, "content": tail + head}
        system = {"role": "system", "content": tail + head}
        return [system, {"role": "user", "content": tail + head}, reply, {"role": "user", "content": tail + head}]

    neutral = counted(rendered(renderer, split("xy", "zzy"), []), tokens)
    for typed in some_of(tokens, renderer.stop_ids):
        for cut in range(1, len(typed)):
            ids = rendered(renderer, split(typed[:cut], typed[cut:]), [])
            assert counted(ids, tokens) == neutral, (typed, cut)


@each_family
def test_a_bridge_makes_no_control_token_of_text(name):
    renderer, tokenizer = made(name)
    tokens = control_of(renderer, tokenizer)
    prompt = rendered(renderer, [USER], [])
    completion = [*tokenizer.encode("So it is.", add_special_tokens=False), renderer.stop_ids[0]]

    def then(text: str) -> list[int] | None:
        return bridged(renderer, prompt, completion, [{"role": "user", "content": f"and{text}then"}])

    neutral = then("xyzzy")
    for typed in some_of(tokens, renderer.stop_ids):
        ids = then(typed)
        assert (ids is None) == (neutral is None)
        if ids is not None and neutral is not None:
            assert ids[: len(prompt) + len(completion)] == prompt + completion
            assert counted(ids, tokens) == counted(neutral, tokens)
            assert tokenizer.decode(ids) == tokenizer.decode(neutral).replace("xyzzy", typed)


@each_family
def test_text_that_spells_none_is_rendered_as_the_package_does(name):
    renderer, _ = made(name)
    if not isinstance(renderer, PackageRenderer):
        pytest.skip("ours; tests/conformance/test_conformance.py holds it against its template")
    for conversation in conversations(5, 10):
        messages = [{"role": "user", "content": conversation.question}]
        for exchange in conversation.exchanges:
            messages += [{"role": "assistant", "content": exchange.intent.content or "so"}, USER]
        given = {"tools": list(conversation.tools) or None, "add_generation_prompt": True}
        assert render_ids(renderer, messages, **given) == renderer._inner.render_ids(messages, **given)
