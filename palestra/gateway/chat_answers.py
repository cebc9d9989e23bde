"""OpenAI's `chat.completion`, whole and in chunks; put together, the chunks are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.gateway.answering import EventWriter, Played
from palestra.gateway.logprobs import TokenBytes, chat_logprobs
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat
from palestra.session import CallStart, ReplyPiece


def completion(played: Played, bytes_of: TokenBytes | None, return_ids: bool) -> dict[str, Any]:
    """The whole; with logprobs where `bytes_of` is given."""
    first, choices = played.chats[0], []
    for number, (chat, top) in enumerate(zip(played.chats, played.top, strict=True)):
        choice: dict[str, Any] = {
            "index": number,
            "message": _message(chat.reply),
            "finish_reason": _finish_reason(chat),
            "logprobs": None,
        }
        ids = chat.completion_ids.tolist()
        if bytes_of is not None:
            choice["logprobs"] = chat_logprobs(ids, chat.logprobs.tolist(), top, bytes_of)
        choices.append(choice | ({"token_ids": ids} if return_ids else {}))
    return {
        "id": completion_id(first.episode_id, first.fence, first.index),
        "object": "chat.completion",
        "created": int(first.finished_at),
        "model": first.policy,
        "choices": choices,
        "usage": usage_of(played.chats, len(played.chats)),
        "system_fingerprint": fingerprint(played.chats),
        **({"prompt_token_ids": first.prompt_ids.tolist()} if return_ids else {}),
    }


def completion_id(episode_id: str, fence: int, index: int, kind: str = "chatcmpl") -> str:
    """Of an answer, after its first call."""
    return f"{kind}-{episode_id}-{fence}-{index}"


def fingerprint(chats: Sequence[Chat]) -> str:
    """The policy's version with which the last token was sampled."""
    return f"version-{chats[-1].versions[-1].version}"


def usage_of(chats: Sequence[Chat], choices: int) -> dict[str, Any]:
    """Tokens of an answer; a prompt counts once for its `choices`."""
    prompts = chats[::choices]
    prompt = sum(chat.prompt_tokens for chat in prompts)
    sampled = sum(len(chat.completion_ids) for chat in chats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(chat.shared for chat in prompts)},
    }


def _message(reply: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning_content is not None:
        message["reasoning_content"] = reply.reasoning_content
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
    return message


def _finish_reason(chat: Chat) -> str:
    return "tool_calls" if chat.reply.tool_calls else chat.finish_reason


class ChatStream(EventWriter):
    """`chat.completion.chunk` events, and `[DONE]`."""

    def __init__(self, model: str, created: float, bytes_of: TokenBytes | None, return_ids: bool, usage: bool) -> None:
        """With logprobs where `bytes_of` is given; with the exact ids; with a last chunk for the usage."""
        super().__init__()
        self._bytes_of, self._ids, self._usage = bytes_of, return_ids, usage
        self._head: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": int(created)}
        self._head |= {"model": model, "system_fingerprint": None}
        self._prompt: list[int] | None = None  # to be told with the next chunk
        self._said: dict[int, set[str]] = {}  # fields of each choice's message that have been told of
        self._calls: dict[int, int] = {}

    def started(self, choice: int, start: CallStart) -> None:
        """See `Listener`."""
        if not self._head["id"]:
            self._head["id"] = completion_id(start.episode_id, start.fence, start.index)
            self._prompt = start.prompt_ids.tolist() if self._ids else None
        self._said[choice], self._calls[choice] = set(), 0

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        """See `Listener`."""
        delta = self._delta(choice, piece)
        more: dict[str, Any] = {"logprobs": None}
        if self._bytes_of is not None and piece.ids:
            more["logprobs"] = chat_logprobs(piece.ids, piece.logprobs, piece.top, self._bytes_of)
        if self._ids:
            more["token_ids"] = list(piece.ids)
        if delta or more["logprobs"] is not None or more.get("token_ids"):
            self._chunk(choice, delta, None, more)

    def finished(self, choice: int, chat: Chat) -> None:
        """See `Listener`."""
        delta: dict[str, Any] = {}
        if not self._said[choice]:
            delta["role"] = "assistant"
        if "content" not in self._said[choice] and not chat.reply.tool_calls:
            delta["content"] = ""
        self._head["system_fingerprint"] = fingerprint([chat])
        self._chunk(choice, delta, _finish_reason(chat), {"logprobs": None})

    def ended(self, chats: Sequence[Chat]) -> None:
        """See `EventWriter`."""
        if self._usage:
            self.write(self._head | {"choices": [], "usage": usage_of(chats, len(chats))})
        self.write(b"[DONE]")

    def _delta(self, choice: int, piece: ReplyPiece) -> dict[str, Any]:
        added, said = piece.delta, self._said[choice]
        delta: dict[str, Any] = {}
        if added.reasoning:
            delta["reasoning_content"] = added.reasoning
        if added.content:
            delta["content"] = added.content
        if added.calls:
            first = self._calls[choice]
            delta["tool_calls"] = [{"index": first + k} | call.model_dump() for k, call in enumerate(added.calls)]
            self._calls[choice] += len(added.calls)
        if delta and not said:
            delta = {"role": "assistant"} | delta
        said.update(delta)
        return delta

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None, more: dict[str, Any]) -> None:
        entry = {"index": choice, "delta": delta, "finish_reason": finish_reason} | more
        chunk = self._head | {"choices": [entry]}
        if self._usage:
            chunk["usage"] = None
        if self._prompt is not None:
            chunk["prompt_token_ids"], self._prompt = self._prompt, None
        self.write(chunk)
