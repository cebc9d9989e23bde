"""The three steps that a session needs: messages to a prompt, to what follows a reply, and ids to a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from palestra.chat.chatml import ChatMLRenderer
from palestra.chat.json_text import object_text, read_object
from palestra.chat.long_text import PIECE, LongText, TooManyTokens
from palestra.chat.token_bytes import token_bytes
from palestra.chat.tool_calls import Attempt
from palestra.schemas.messages import ChatMessage, FunctionCall, ToolCall, text_message
from palestra.schemas.records import Ids

Tools = Sequence[Mapping[str, Any]]  # OpenAI's: {"type": "function", "function": {…}}


class Renderer(Protocol):
    """The part of the `renderers` protocol that is used here, and what is known of the model."""

    reasons: bool  # whether the model was made to reason before it answers, as far as its template says

    def render_ids(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """A whole conversation."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
    ) -> Any:
        """An extension of a conversation whose last reply was sampled; None where it can't be had."""
        ...

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """Text, reasoning and tool calls of a reply."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a reply."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The message that a completion stands for."""

    message: ChatMessage
    malformed: tuple[str, ...]  # why a tool call could not be understood, one a call; their text is in the content


def render(renderer: Renderer, messages: Sequence[ChatMessage], tools: Tools = (), room: int | None = None) -> Ids:
    """[P], the whole prompt, with an open assistant turn.

    Raises:
        TooManyTokens: there are more than `room`; found before all of a long prompt is tokenised.
    """
    if isinstance(renderer, ChatMLRenderer):
        given = _dicts(messages)
        return np.asarray(
            renderer.render_ids(given, tools=_given(tools), add_generation_prompt=True, room=room), np.int32
        )
    _check_room(renderer, messages, room)
    ids = renderer.render_ids(_dicts(messages), tools=_given(tools), add_generation_prompt=True)
    return np.asarray(ids, np.int32)


def bridge(
    renderer: Renderer,
    prompt_ids: Callable[[], Ids],
    completion_ids: Ids,
    new_messages: Sequence[ChatMessage],
    tools: Tools = (),
    room: int | None = None,
) -> Ids | None:
    """What follows a call's prompt and completion, [N], where `new_messages` follow its reply; None: not possible.

    `tools` must be those of the call. Ours never needs the prompt, and can always go on. Of a renderer of the package
    nothing is taken that does not begin with the exact ids.

    Raises:
        TooManyTokens: there are more than `room`; see `render`.
    """
    if isinstance(renderer, ChatMLRenderer):
        return np.asarray(renderer.continuation(completion_ids[-1:].tolist(), _dicts(new_messages), room), np.int32)
    _check_room(renderer, new_messages, room)
    prompt, completion = prompt_ids().tolist(), completion_ids.tolist()
    names: dict[str, str] = {}
    if any(m.role == "tool" and m.name is None for m in new_messages):
        _, _, attempts = _read_with_package(renderer, completion_ids, prompt_ids, tools)
        names = _names([a.name or "" for a in attempts if a.problem is None], new_messages)
    bridged = renderer.bridge_to_next_turn(prompt, completion, _dicts(new_messages, names), tools=_given(tools))
    if bridged is None:
        return None
    history = prompt + completion
    if list(bridged.token_ids[: len(history)]) != history:
        return None
    return np.asarray(bridged.token_ids[len(history) :], np.int32)


def _check_room(renderer: Renderer, messages: Sequence[ChatMessage], room: int | None) -> None:
    """Refuse what can't fit, whatever the template makes of it: it writes what users say, but perhaps not its edges."""
    said = [message.text.strip() for message in messages if message.role == "user"]
    if room is not None and sum(map(len, said)) > PIECE:
        fewest = long_text(renderer).fewest("".join(said))  # type: ignore[arg-type]  # by identity
        if fewest > room:
            raise TooManyTokens(fewest)


def parse_reply(
    renderer: Renderer,
    completion_ids: Ids,
    prompt_ids: Callable[[], Ids],
    tools: Tools = (),
    call_ids: str = "call",
) -> Reply:
    """The assistant's message that a completion stands for. Tool call k has the id `{call_ids}_{k}`."""
    if isinstance(renderer, ChatMLRenderer):
        reasoning, content, attempts = renderer.read_reply(completion_ids.tolist(), bool(tools))
    else:
        reasoning, content, attempts = _read_with_package(renderer, completion_ids, prompt_ids, tools)
    good = [a for a in attempts if a.problem is None]
    calls = tuple(
        ToolCall(id=f"{call_ids}_{k}", function=FunctionCall(name=a.name or "", arguments=a.arguments or "{}"))
        for k, a in enumerate(good)
    )
    message = text_message("assistant", content)
    if reasoning is not None or calls:
        message = message.model_copy(update={"reasoning_content": reasoning, "tool_calls": calls})
    problems = tuple(f"tool call {k}: {a.problem}" for k, a in enumerate(attempts) if a.problem is not None)
    return Reply(message=message, malformed=problems)


def _read_with_package(
    renderer: Renderer, completion_ids: Ids, prompt_ids: Callable[[], Ids], tools: Tools
) -> tuple[str | None, str, list[Attempt]]:
    ids = completion_ids.tolist()
    try:
        parsed = renderer.parse_response(ids, tools=_given(tools), prompt_ids=prompt_ids().tolist())
    except RecursionError:  # a model can write JSON that no parser of the package can read
        stops = renderer.get_stop_token_ids()
        end = next((k for k, token in enumerate(ids) if token in stops), len(ids))
        text = renderer._tokenizer.decode(ids[:end])  # type: ignore[attr-defined]  # each of the package has it
        return None, text, [Attempt(text=text, problem="it is nested too deep")] if tools else []
    attempts = [_attempt(call) for call in parsed.tool_calls]
    text = [a.text for a in attempts if a.problem is not None or not tools]
    content = "\n".join([parsed.content, *text] if parsed.content else text)
    return parsed.reasoning_content or None, content, attempts if tools else []


def _attempt(call: Any) -> Attempt:
    """A call that the package has read, or has tried to."""
    if call.status != "ok" or not call.name:
        return Attempt(text=call.raw, problem=str(call.status))
    arguments = _arguments(call.raw, call.arguments)
    problem = None if arguments is not None else "its arguments are not a JSON object"
    return Attempt(text=call.raw, name=call.name, arguments=arguments, problem=problem)


def _arguments(raw: str, value: Any) -> str | None:
    """Arguments as the model wrote them, where it wrote JSON; else their value as JSON. None: it is no object."""
    if isinstance(value, str):
        return object_text(value)
    try:
        members = read_object(raw)[0]
        written = members.get("arguments") or members.get("parameters")
    except ValueError:  # the format is not JSON
        written = None
    if written is not None and isinstance(value, dict) and written.value == value:
        return written.text
    try:
        return object_text(json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


@lru_cache(maxsize=8)
def bytes_of_tokens(renderer: Renderer) -> Callable[[int], bytes]:
    """See `token_bytes`; of a renderer's tokenizer."""
    return token_bytes(renderer._tokenizer)  # type: ignore[attr-defined]  # ours and each of the package have it


@lru_cache(maxsize=8)
def long_text(renderer: Renderer) -> LongText:
    """What is known of long texts of a renderer's tokenizer, control tokens in them included."""
    tokenizer = renderer._tokenizer  # type: ignore[attr-defined]  # ours and each of the package have it
    return LongText(tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False))


def _given(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None


def _names(called: Sequence[str], answers: Sequence[ChatMessage]) -> dict[str, str]:
    """Ids of calls to the tools' names; `parse_reply` ends the id of call k with `_k`."""
    ids = [m.tool_call_id for m in answers if m.tool_call_id is not None]
    numbers = {call: call.rpartition("_")[2] for call in ids}
    return {call: called[int(k)] for call, k in numbers.items() if k in {str(i) for i in range(len(called))}}


def _dicts(messages: Sequence[ChatMessage], names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Messages as the package takes them. A tool's answer is told which tool: some formats show it."""
    named = {**(names or {}), **{call.id: call.function.name for m in messages for call in m.tool_calls}}
    return [_dict(message, named) for message in messages]


def _dict(message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
    if name is not None:
        out["name"] = name
    return out
