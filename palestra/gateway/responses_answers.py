"""OpenAI's `response`, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.gateway.answering import EventWriter
from palestra.gateway.chat_answers import completion_id
from palestra.schemas.records import Chat
from palestra.session import CallStart, GenerationRequest, ReplyPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """What an answer repeats of its request."""

    call: GenerationRequest
    sent: Mapping[str, Any]
    stream: bool


def response_of(chat: Chat, echo: Echo) -> dict[str, Any]:
    """The whole."""
    name = completion_id(chat.episode_id, chat.fence, chat.index, "resp")
    cut = chat.finish_reason == "length"
    return _frame(name, chat.finished_at, echo) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "temperature": chat.sampling.temperature,
        "output": output_of(chat),
        "usage": {
            "input_tokens": chat.prompt_tokens,
            "input_tokens_details": {"cached_tokens": chat.shared, "cache_write_tokens": 0},
            "output_tokens": len(chat.completion_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chat.tokens,
        },
    }


def _frame(name: str, created: float, echo: Echo) -> dict[str, Any]:
    sent = echo.sent
    return {
        "id": name,
        "object": "response",
        "created_at": int(created),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": sent.get("instructions"),
        "max_output_tokens": sent.get("max_output_tokens"),
        "metadata": {},
        "model": echo.call.policy,
        "output": [],
        "parallel_tool_calls": echo.call.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sent.get("temperature"),
        "text": sent.get("text", {"format": {"type": "text"}}),
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": echo.call.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def output_of(chat: Chat) -> list[dict[str, Any]]:
    """The reply as items: reasoning, message, calls."""
    name, reply = completion_id(chat.episode_id, chat.fence, chat.index, ""), chat.reply
    status = "incomplete" if chat.finish_reason == "length" else "completed"
    items = []
    if reply.reasoning_content is not None:
        over = "completed" if reply.text or reply.tool_calls else status
        items.append(_reasoning(name, reply.reasoning_content, over))
    if reply.text or not reply.tool_calls:
        items.append(_said(name, reply.text, status))
    for number, call in enumerate(reply.tool_calls):
        items.append(
            {
                "id": f"fc{name}-{number}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
        )
    return items


def _reasoning(name: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs{name}", "type": "reasoning", "summary": [], "content": content, "status": status}


def _said(name: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text)]
    return {"id": f"msg{name}", "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseStream(EventWriter):
    """The events of one response. An item is closed before the next one opens."""

    def __init__(self, echo: Echo, created: float) -> None:
        super().__init__()
        self._echo, self._created = echo, created
        self._sequence = 0
        self._name = ""
        self._output: list[dict[str, Any]] = []  # items that are open or done
        self._open: str | None = None  # the type of the open one
        self._text: list[str] = []  # of the open one

    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""
        self._name = completion_id(start.episode_id, start.fence, start.index, "")
        frame = _frame(f"resp{self._name}", self._created, self._echo)
        self._event("response.created", response=frame)
        self._event("response.in_progress", response=frame)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""
        if piece.delta.reasoning:
            self._add("reasoning", piece.delta.reasoning)
        if piece.delta.content:
            self._add("message", piece.delta.content)

    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""
        items = output_of(chat)
        if self._open is not None:
            self._close(items[len(self._output) - 1])
        for item in items[len(self._output) :]:
            if item["type"] == "function_call":
                self._call(item)
            else:  # a message without text
                self._begin(item["type"])
                self._close(item)
        kind = "response.incomplete" if chat.finish_reason == "length" else "response.completed"
        self._event(kind, response=response_of(chat, self._echo) | {"created_at": int(self._created)})

    def ended(self, chats: Sequence[Chat]) -> None:
        """See `EventWriter`."""

    def failed(self, body: Mapping[str, Any]) -> None:
        """See `EventWriter`."""
        error = body["error"]
        self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)

    def _add(self, kind: str, text: str) -> None:
        if self._open != kind:
            if self._open is not None:
                self._close(_reasoning(self._name, "".join(self._text), "completed"))
            self._begin(kind)
        self._text.append(text)
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        if kind == "message":
            self._event("response.output_text.delta", **place, delta=text, logprobs=[])
        else:
            self._event("response.reasoning_text.delta", **place, delta=text)

    def _begin(self, kind: str) -> None:
        empty = (
            _said(self._name, None, "in_progress") if kind == "message" else _reasoning(self._name, "", "in_progress")
        )
        self._output.append(empty)
        self._open = kind
        self._text.clear()
        index = len(self._output) - 1
        self._event("response.output_item.added", output_index=index, item=empty)
        part = _text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        self._event("response.content_part.added", item_id=empty["id"], output_index=index, content_index=0, part=part)

    def _close(self, item: dict[str, Any]) -> None:
        index = len(self._output) - 1
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        part = item["content"][0]
        if item["type"] == "message":
            self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
        else:
            self._event("response.reasoning_text.done", **place, text=part["text"])
        self._event("response.content_part.done", **place, part=part)
        self._event("response.output_item.done", output_index=index, item=item)
        self._output[-1] = item
        self._open = None

    def _call(self, item: dict[str, Any]) -> None:
        index = len(self._output)
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        self._event("response.output_item.added", output_index=index, item=begun)
        self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        self._event("response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> None:
        self.write({"type": kind, "sequence_number": self._sequence} | fields, kind)
        self._sequence += 1
