"""Probe conversations: a renderer is chosen for a model only if its ids on them equal the template's."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from palestra.errors import ModelError
from palestra.types.messages import ChatMessage

TEMPLATE_SECONDS = 5.0


class _Endless(Exception):
    """The time of a template is over."""


def template_text(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """Return the result of a tokenizer's `apply_chat_template`. Raises TemplateError, TypeError, ValueError: it refuses
    the conversation.
    """
    try:
        with _limited(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(messages, **options)
    except _Endless:
        raise ModelError(f"the chat template of the model takes longer than {TEMPLATE_SECONDS:g} s") from None
    except (ArithmeticError, RecursionError, MemoryError, LookupError, AttributeError) as error:
        name = type(error).__name__
        raise ModelError(f"the chat template of the model has a defect: {name}: {error}") from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_Endless` in this thread, between two steps of Python, when the block takes longer."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Endless))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended = True
        timer.cancel()


ROLES = ("system", "user", "assistant", "tool")
Unseen = frozenset[tuple[str, str]]  # roles, and keys of their messages


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation. Arguments of calls are objects, because many templates only accept these."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("weather", 'Says what the sky is like; "where" is a city.', where={"type": "string"}),
    _tool("add", "a + b, für 漢字 & <b>", a={"type": "number"}, b={"type": "number"}),
)
_ASK: dict[str, Any] = {"role": "user", "content": "How is it in Łódź?"}
_CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_call("weather", where="Łódź")]}
_PARALLEL: dict[str, Any] = {
    "role": "assistant",
    "content": "Both.",
    "tool_calls": [_call("weather", where='"x"\n'), _call("add", a=1, b=[2.5, None, True, {}])],
}
_RESULT: dict[str, Any] = {"role": "tool", "name": "weather", "tool_call_id": "call_0", "content": '{"sky": "clear"}'}

PLAIN = (
    Probe([{"role": "user", "content": "Hi."}]),
    Probe([{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1?\n"}]),
    Probe(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b\n"},
            {"role": "user", "content": "é 漢字"},
        ]
    ),
)
WITH_TOOLS = (
    Probe([_ASK], TOOLS),
    Probe([_ASK, _CALL, _RESULT], TOOLS),
    Probe([{"role": "system", "content": "Be brief."}, _ASK, _PARALLEL, _RESULT, _RESULT], TOOLS[:1]),
    Probe(
        [
            _ASK,
            _PARALLEL,
            _RESULT,
            {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": " "},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "And now?"},
            _CALL,
            _RESULT,
        ],
        TOOLS,
    ),
)


def in_parts(probe: Probe) -> Probe:
    """Return a conversation whose contents are lists of parts, as vision-language templates expect."""
    return Probe([{**m, "content": [_said(m["content"])]} for m in probe.messages], probe.tools)


def _said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


NO_PICTURE = "0" * 64  # digest of the pictures of probes, of which there is no file
_PICTURE = {"type": "image"}
PICTURED = (
    *map(in_parts, PLAIN),
    Probe([{"role": "user", "content": [_PICTURE, _said("One?")]}]),
    Probe([{"role": "user", "content": [_said("One."), _PICTURE, _said("Two.")]}]),
    Probe(
        [
            {"role": "system", "content": [_said("Be brief.")]},
            {"role": "user", "content": [_PICTURE, _PICTURE, _said(" é 漢字")]},
            {"role": "assistant", "content": [_said("b")]},
            {"role": "user", "content": [_said("c")]},
        ]
    ),
)
_THOUGHT: dict[str, Any] = {"role": "assistant", "content": "2", "reasoning_content": "One and one."}
REASONING = (
    Probe([{"role": "user", "content": "1 + 1?"}, _THOUGHT, {"role": "user", "content": "Sure?"}]),
    Probe([_ASK, {**_CALL, "reasoning_content": "I'll look."}, _RESULT], TOOLS),
)


def as_agents_send(probe: Probe) -> list[ChatMessage]:
    """Return the messages of a conversation as agents send them: arguments of calls are JSON text.

    All pictures are `NO_PICTURE`, which only a writer from `PictureTokens.as_marked` can write.
    """
    return [ChatMessage.model_validate(_with_text_arguments(message)) for message in probe.messages]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    content = message["content"]
    if isinstance(content, list):
        content = [part | {"digest": NO_PICTURE} if part["type"] == "image" else part for part in content]
    return {**message, "content": content, "tool_calls": calls}


NAMES: Unseen = frozenset({*((role, "name") for role in ROLES), ("tool", "tool_call_id")})


def unseen_of(show: Callable[[Sequence[ChatMessage]], object]) -> Unseen:
    """Return the roles and keys of `NAMES` that do not affect the model's input. `show` returns the ids of a
    conversation; None: it is refused.
    """
    call, other = _call("weather", where="x"), _call("add", a=1) | {"id": "call_1"}
    spoken: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answered: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "call_0", "content": "d"},
        {"role": "tool", "tool_call_id": "call_1", "content": "e"},
    ]

    def makes_no_difference(role: str, key: str) -> bool:
        for messages in (spoken, answered):
            places = [n for n, message in enumerate(messages) if message["role"] == role]
            shown = [
                show(as_agents_send(Probe([m | changes if n in places else m for n, m in enumerate(messages)])))
                for changes in ({}, {key: "call_1"}, {key: "Ann"})
            ]
            if places and (None in shown or any(one != shown[0] for one in shown)):
                return False
        return True

    return frozenset((role, key) for role, key in NAMES if makes_no_difference(role, key))


def shows_reasoning(show: Callable[[Probe], object]) -> bool:
    """Return whether the model gets the reasoning of earlier replies. `show` returns the text or the ids of a
    conversation.
    """

    def without(message: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in message.items() if key != "reasoning_content"}

    return any(show(p) != show(Probe([without(m) for m in p.messages], p.tools)) for p in REASONING)
