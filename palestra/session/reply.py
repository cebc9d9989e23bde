"""A reply while it is sampled: token by token to text, to where it ends, and to its message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from palestra.chat import ChatMLRenderer, Reply, parse_reply
from palestra.chat.stop_strings import StopStrings
from palestra.chat.streaming import MessageDelta, ReplySplitter, whole_message
from palestra.chat.text_stream import TextStream
from palestra.errors import EngineFailure
from palestra.schemas.messages import ChatMessage, TextPart, text_message
from palestra.schemas.protocols import Engine
from palestra.schemas.records import Ids, SampledTokens, SamplingParams, VersionSpan
from palestra.session.call import GenerationRequest, ReplyPiece
from palestra.session.context import PolicyRuntime

NOTHING = MessageDelta()
CALL_END = "</tool_call>"  # what `Chat.stop` says of a reply that its first call ended


class ReplyReader:
    """Where a reply ends besides at a stop token or its limit, and what is certain of its message so far."""

    def __init__(
        self, call: GenerationRequest, runtime: PolicyRuntime, sampling: SamplingParams, call_ids: str
    ) -> None:
        """The ids of tool calls start with `call_ids`."""
        self._call, self._runtime, self._call_ids = call, runtime, call_ids
        self._text = TextStream(runtime.decode, runtime.stop_ids | set(call.stop_token_ids))
        self._stops = StopStrings(call.stop)
        self._min_tokens = sampling.min_tokens
        self._tokens = 0
        self._certain: list[str] = []  # text before any stop string
        self._told: list[MessageDelta] = []
        self._splitter: ReplySplitter | None = None
        self._raw = call.prompt is not None
        if not self._raw and isinstance(runtime.renderer, ChatMLRenderer):
            self._splitter = ReplySplitter(bool(call.callable_tools), call_ids, not call.parallel_tool_calls)
        self.stop: str | None = None  # the string that ended it

    def take(self, token: int) -> MessageDelta:
        """What is certain of the message with this token. If `stop` is set after it, it was the last."""
        self._tokens += 1
        text = self._text.add(token)
        return self._take(text) if text else NOTHING

    def finish(self, ids: Ids, prompt_ids: Ids) -> tuple[MessageDelta, Reply]:
        """What was not certain before, and the reply; `ids` are all that were taken."""
        last = self._take(self._text.end()) if self.stop is None else NOTHING
        if self.stop is None:
            last += self._split(self._stops.end())
        if self._splitter is None and not self._raw:
            reply = self._read_with_package(ids, prompt_ids)
            return whole_message(reply.message), reply
        malformed = 0
        if self._splitter is not None:
            rest = self._splitter.end()
            self._told.append(rest)
            last += rest
            malformed = self._splitter.malformed
        return last, Reply(message=_message(self._told), malformed=("a tool call could not be read",) * malformed)

    def _take(self, text: str) -> MessageDelta:
        if self._tokens > self._min_tokens:
            text = self._stops.feed(text)
            self.stop = self._stops.found
        return self._split(text)

    def _split(self, text: str) -> MessageDelta:
        self._certain.append(text)
        if self._raw:
            delta = MessageDelta(content=text)
        elif self._splitter is None:
            return NOTHING  # the package reads whole replies
        else:
            delta = self._splitter.feed(text)
            if self._splitter.over:
                self.stop = CALL_END
        if delta:
            self._told.append(delta)
        return delta

    def _read_with_package(self, ids: Ids, prompt_ids: Ids) -> Reply:
        """The package reads ids: of a reply that a string ended, those before it; the rest is added to the text."""
        if self.stop is None:
            return read_whole(self._call, self._runtime, ids, prompt_ids, self._call_ids)
        text, kept = "".join(self._certain), len(ids)
        while kept and not text.startswith(self._runtime.decode(ids[:kept].tolist())):
            kept -= 1
        reply = read_whole(self._call, self._runtime, ids[:kept], prompt_ids, self._call_ids)
        rest = text[len(self._runtime.decode(ids[:kept].tolist())) :]
        message = reply.message
        if message.reasoning_content and not message.text and not message.tool_calls:
            added = message.model_copy(update={"reasoning_content": message.reasoning_content + rest})
        else:
            added = message.model_copy(update={"content": (TextPart(text=message.text + rest),)})
        return Reply(message=added, malformed=reply.malformed)


def read_whole(call: GenerationRequest, runtime: PolicyRuntime, ids: Ids, prompt_ids: Ids, call_ids: str) -> Reply:
    """The reply that all ids of a call stand for; a stop token of the caller's own at its end is not part of it."""
    if len(ids) and int(ids[-1]) in call.stop_token_ids and int(ids[-1]) not in runtime.stop_ids:
        ids = ids[:-1]
    return parse_reply(runtime.renderer, ids, lambda: prompt_ids, call.callable_tools, call_ids)


def _message(deltas: list[MessageDelta]) -> ChatMessage:
    reasoning = "".join(delta.reasoning for delta in deltas) or None
    calls = tuple(call for delta in deltas for call in delta.calls)
    return text_message("assistant", "".join(delta.content for delta in deltas)).model_copy(
        update={"reasoning_content": reasoning, "tool_calls": calls}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine sampled."""

    ids: Ids  # [C]
    logprobs: NDArray[np.float32]  # [C]
    versions: tuple[VersionSpan, ...]


async def sample(
    engine: Engine,
    policy: str,
    prompt_ids: Ids,
    sampling: SamplingParams,
    reader: ReplyReader | None,
    tell: Callable[[ReplyPiece], None] | None,
) -> Completion:
    """Have a reply sampled; with a `reader` only as far as it says, and then the engine is told to stop.

    Raises:
        EngineFailure: the engine could not finish, or gave no token.
    """
    stream = engine.generate(policy, prompt_ids, sampling)
    if reader is None:
        return _join([piece async for piece in stream])
    pieces: list[SampledTokens] = []
    async with aclosing(cast("AsyncGenerator[SampledTokens, None]", stream)) as sampled:
        async for piece in sampled:
            delta, kept = NOTHING, 0
            while kept < len(piece.ids) and reader.stop is None:
                delta += reader.take(piece.ids[kept])
                kept += 1
            ids, logprobs, top = piece.ids[:kept], piece.logprobs[:kept], piece.top[:kept]
            pieces.append(SampledTokens(ids=ids, logprobs=logprobs, version=piece.version))
            if tell is not None and kept:
                tell(ReplyPiece(delta=delta, ids=ids, logprobs=logprobs, top=top))
            if reader.stop is not None:
                break
    return _join(pieces)


def _join(pieces: list[SampledTokens]) -> Completion:
    spans: list[VersionSpan] = []
    for piece in pieces:
        if spans and spans[-1].version == piece.version:
            spans[-1] = VersionSpan(piece.version, spans[-1].tokens + len(piece.ids))
        elif piece.ids:
            spans.append(VersionSpan(piece.version, len(piece.ids)))
    if not spans:
        raise EngineFailure("the engine returned no token")
    ids = [token for piece in pieces for token in piece.ids]
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return Completion(ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32), versions=tuple(spans))
