"""A conversation laid out as ChatML turns, as text: what stands between one start token and its end token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat.thoughts import write_thought
from palestra.chat.tool_calls import offer, write_call, write_result

Turn = list["Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a turn's text."""

    text: str
    message: int  # index of its message; -1: the template's own
    sampled: bool = False  # a model would have written it


def first_turn(messages: Sequence[Any], tools: Sequence[Any], default: str | None) -> Turn | None:
    """The system turn, if there is one: the first message's, or else the template's, with the tools."""
    given = bool(messages) and messages[0]["role"] == "system"
    said = (messages[0].get("content") or "") if given else default
    if said is None and not tools:
        return None
    parts = ([] if said is None else [said]) + ([offer(tools)] if tools else [])
    return [Piece("system\n" + "\n\n".join(parts), 0 if given else -1)]


def turns(messages: Sequence[Any], start: int = 0) -> Iterator[Turn]:
    """The turns of `messages[start:]`. Results of tools that follow one another share a turn."""
    results: Turn = []
    for index in range(start, len(messages)):
        message = messages[index]
        if message["role"] == "tool":
            head = "\n" if results else "user\n"
            results.append(Piece(head + write_result(message.get("content") or ""), index))
            continue
        if results:
            yield results
            results = []
        if message["role"] == "assistant":
            yield [Piece("assistant\n", index), Piece(_reply(message), index, sampled=True)]
        else:
            yield [Piece(f"{message['role']}\n{message.get('content') or ''}", index)]
    if results:
        yield results


def _reply(message: Mapping[str, Any]) -> str:
    thought = message.get("reasoning_content")
    content = message.get("content") or ""
    calls = [write_call(call) for call in message.get("tool_calls") or ()]
    answer = "\n".join([content, *calls] if content or not calls else calls)
    return write_thought(thought) + answer if thought else answer
