"""Anthropic's `message`, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.gateway.answering import EventWriter
from palestra.gateway.chat_answers import completion_id
from palestra.http.errors import Failure
from palestra.schemas.records import Chat
from palestra.session import CallStart, ReplyPiece
from palestra.session.reply import CALL_END

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(failure: Failure) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = _ERRORS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


def message_of(chat: Chat) -> dict[str, Any]:
    """The whole."""
    return _frame(completion_id(chat.episode_id, chat.fence, chat.index, "msg"), chat.policy) | {
        "content": _blocks(chat),
        **_end(chat),
        "usage": _usage(chat.prompt_tokens, chat.shared, len(chat.completion_ids)),
    }


def _frame(name: str, model: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _end(chat: Chat) -> dict[str, Any]:
    string = chat.stop if chat.stop != CALL_END else None
    reason = "max_tokens" if chat.finish_reason == "length" else "end_turn" if string is None else "stop_sequence"
    return {"stop_reason": "tool_use" if chat.reply.tool_calls else reason, "stop_sequence": string}


def _usage(prompt: int, shared: int, sampled: int) -> dict[str, Any]:
    """Anthropic counts what was read from a cache apart from the other input."""
    return {
        "input_tokens": prompt - shared,
        "cache_read_input_tokens": shared,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }


def _blocks(chat: Chat) -> list[dict[str, Any]]:
    reply, blocks = chat.reply, []
    if reply.reasoning_content is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        given = json.loads(call.function.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": given})
    return blocks


class MessageStream(EventWriter):
    """The events of one message. A block is closed before the next one opens."""

    error_form = staticmethod(anthropic_error)

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._blocks = 0  # open or closed
        self._open: str | None = None  # the type of the open one

    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""
        name = completion_id(start.episode_id, start.fence, start.index, "msg")
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(len(start.prompt_ids), start.shared, 0)
        self._event("message_start", message=_frame(name, self._model) | begun | {"usage": usage})

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""
        if piece.delta.reasoning:
            self._begin("thinking", {"thinking": "", "signature": ""})
            self._delta({"type": "thinking_delta", "thinking": piece.delta.reasoning})
        if piece.delta.content:
            self._begin("text", {"text": ""})
            self._delta({"type": "text_delta", "text": piece.delta.content})

    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""
        for call in chat.reply.tool_calls:
            self._close()
            self._begin("tool_use", {"id": call.id, "name": call.function.name, "input": {}})
            self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})
        self._close()
        usage = _usage(chat.prompt_tokens, chat.shared, len(chat.completion_ids))
        self._event("message_delta", delta=_end(chat), usage=usage)
        self._event("message_stop")

    def ended(self, chats: Sequence[Chat]) -> None:
        """See `EventWriter`."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """See `EventWriter`."""
        self.write(body, "error")

    def _begin(self, kind: str, empty: Mapping[str, Any]) -> None:
        if self._open == kind:
            return
        self._close()
        self._open = kind
        self._event("content_block_start", index=self._blocks, content_block={"type": kind, **empty})
        self._blocks += 1

    def _delta(self, delta: Mapping[str, Any]) -> None:
        self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> None:
        if self._open is not None:
            self._event("content_block_stop", index=self._blocks - 1)
            self._open = None

    def _event(self, kind: str, **fields: Any) -> None:
        self.write({"type": kind} | fields, kind)
