"""Read a reply while it is sampled: decode its tokens, find its end, and parse its message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from palestra.engine.base import Engine, EngineRequest
from palestra.errors import EngineFailure, ReplyLost, UnsupportedField
from palestra.renderers import MessageDelta, PlainTextStream, Renderer, Reply
from palestra.renderers.base import NOTHING
from palestra.renderers.text_stream import StopStrings, TextStream
from palestra.session.policies import PolicyRuntime
from palestra.session.request import ReplyPiece
from palestra.types.calls import (
    FinishReason,
    Ids,
    SampledTokens,
    SamplingParams,
    TokenSequence,
    TopTokens,
    VersionSpan,
)
from palestra.types.messages import GenerationRequest

CALL_END = "</tool_call>"  # value of `Chat.stop` for a reply that ended with its only tool call
_IDS, _LOGPROBS, _TOP = attrgetter("ids"), attrgetter("logprobs"), attrgetter("top")
MOST_ATTEMPTS = 3  # to sample a reply whose beginning is lost with its worker


class ReplyReader:
    """Parses a reply incrementally, and ends it at a stop string or its first tool call.

    Attributes:
        stop: the stop string that ended the reply, or `CALL_END`; None: the reply has not ended this way.
    """

    def __init__(
        self, request: GenerationRequest, renderer: Renderer, min_tokens: int, prompt_ids: Ids, call_ids: str
    ) -> None:
        """Create a reader of an empty reply.

        Args:
            min_tokens: stop strings before so many tokens are ignored.
            prompt_ids: int32 [P].
            call_ids: prefix of the ids of tool calls.
        """
        self._request, self._renderer, self._min_tokens = request, renderer, min_tokens
        self._text = TextStream(renderer.vocabulary.decode, {*renderer.stop_ids, *request.stop_token_ids})
        self._stops = StopStrings(request.stop)
        self._tokens = 0
        tools = request.callable_tools
        self._stream = (
            PlainTextStream()
            if request.prompt is not None
            else renderer.stream(lambda: prompt_ids, tools, call_ids, bool(tools) and not request.parallel_tool_calls)
        )
        self.stop: str | None = None

    def take(self, token: int) -> MessageDelta:
        """Add a token, and return the part of the message that is now final; if `stop` is then set, the reply is
        complete.
        """
        self._tokens += 1
        text = self._text.add(token)
        return self._take(text) if text else NOTHING

    def finish(self, ids: Ids) -> tuple[MessageDelta, Reply]:
        """Return the rest of the message, and the whole reply.

        Args:
            ids: all added tokens, int32 [C].
        """
        last = self._take(self._text.end()) if self.stop is None else NOTHING
        if self.stop is None:
            last += self._feed(self._stops.end())
        rest, reply = self._stream.finish(without_own_stop(ids, self._request, self._renderer), self.stop is not None)
        return last + rest, reply

    def _take(self, text: str) -> MessageDelta:
        """Search text for stop strings, unless the reply is still too short, and parse the text before them."""
        if self._tokens > self._min_tokens:
            text = self._stops.feed(text)
            self.stop = self._stops.found
        return self._feed(text)

    def _feed(self, text: str) -> MessageDelta:
        """Parse text, and end the reply if it was its only tool call."""
        delta = self._stream.feed(text)
        if self._stream.over:
            self.stop = CALL_END
        return delta


def without_own_stop(ids: Ids, request: GenerationRequest, renderer: Renderer) -> Ids:
    """Return a reply's ids [C] without the caller's stop token, which is not part of the message.

    Args:
        ids: int32 [C].
        request: has the caller's stop tokens.
        renderer: has the model's stop tokens, which are kept.
    """
    own = len(ids) and int(ids[-1]) in request.stop_token_ids and int(ids[-1]) not in renderer.stop_ids
    return ids[:-1] if own else ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """The sampled tokens and their message.

    Attributes:
        ids: int32 [C].
        logprobs: float32 [C].
        top: None: not requested.
        versions: of the policy, for runs of consecutive tokens.
        finish_reason: "length": the reply reached its token limit.
        stop: the stop string that ended the reply, if any.
    """

    ids: Ids
    logprobs: NDArray[np.float32]
    top: TopTokens | None
    versions: tuple[VersionSpan, ...]
    reply: Reply
    finish_reason: FinishReason
    stop: str | None


async def sample_reply(
    request: GenerationRequest,
    runtime: PolicyRuntime,
    prompt: TokenSequence,
    sampling: SamplingParams,
    call_ids: str,
    tell: Callable[[ReplyPiece], None] | None,
) -> SampledReply:
    """Sample a reply and parse it, incrementally if there is a listener or its text may end it.

    Args:
        prompt: [P] ids, with their images.
        call_ids: prefix of the ids of tool calls.
        tell: called with each piece of the reply, if given.

    Raises:
        GrammarRefused: the reply's grammar took too much time or memory.
    """
    renderer = runtime.renderer
    piecewise = bool(tell or request.stop or request.prompt is not None or not request.parallel_tool_calls)
    asked = EngineRequest(policy=request.policy, prompt=prompt, sampling=sampling, streamed=piecewise)
    listener = None if tell is None else _Listener(tell)
    for attempt in range(MOST_ATTEMPTS):
        reader = None
        if piecewise:
            reader = ReplyReader(request, renderer, sampling.min_tokens, prompt.ids, call_ids)
        try:
            pieces = await _sample(runtime.engine, asked, reader, listener)
            break
        except ReplyLost:  # what was read of it is dropped, unless the listener has heard it
            if (listener is not None and listener.heard) or attempt == MOST_ATTEMPTS - 1:
                raise
    ids, logprobs, versions = _join(pieces)
    top = _top_of(pieces, len(ids), sampling.top_logprobs) if sampling.top_logprobs else None
    if reader is None:
        own = without_own_stop(ids, request, renderer) if request.stop_token_ids else ids
        reply = renderer.parse(own, lambda: prompt.ids, request.callable_tools, call_ids)
    else:
        rest, reply = reader.finish(ids)
        if tell is not None and rest:
            tell(ReplyPiece(delta=rest))
    stop = None if reader is None else reader.stop
    stopped = stop is not None or int(ids[-1]) in {*renderer.stop_ids, *sampling.stop_ids}
    return SampledReply(
        ids=ids,
        logprobs=logprobs,
        top=top,
        versions=versions,
        reply=reply,
        finish_reason="stop" if stopped else "length",
        stop=stop,
    )


class _Listener:
    """Hands on the pieces of a reply, and knows whether it has handed on any."""

    def __init__(self, tell: Callable[[ReplyPiece], None]) -> None:
        self._tell, self.heard = tell, False

    def __call__(self, piece: ReplyPiece) -> None:
        self.heard = True
        self._tell(piece)


async def _sample(
    engine: Engine,
    request: EngineRequest,
    reader: ReplyReader | None,
    tell: Callable[[ReplyPiece], None] | None,
) -> list[SampledTokens]:
    """Have a reply sampled. With a `reader`, sampling stops as soon as the reader finds the end."""
    stream = engine.generate(request)
    pieces: list[SampledTokens] = []
    if reader is None:
        async for whole in stream:
            pieces.append(whole)
        return pieces
    async with aclosing(cast("AsyncGenerator[SampledTokens, None]", stream)) as sampled:
        async for piece in sampled:
            delta, kept = NOTHING, 0
            while kept < len(piece.ids) and reader.stop is None:
                delta += reader.take(piece.ids[kept])
                kept += 1
            ids, logprobs, top = piece.ids[:kept], piece.logprobs[:kept], piece.top[:kept]
            pieces.append(SampledTokens(ids=ids, logprobs=logprobs, version=piece.version, top=top))
            if tell is not None and kept:
                tell(ReplyPiece(delta=delta, ids=ids, logprobs=logprobs, top=top))
            if reader.stop is not None:
                break
    return pieces


def _join(pieces: Sequence[SampledTokens]) -> tuple[Ids, NDArray[np.float32], tuple[VersionSpan, ...]]:
    """Return ids int32 [C], logprobs float32 [C] and versions of all pieces together."""
    spans: list[VersionSpan] = []
    for piece in pieces:
        if spans and spans[-1].version == piece.version:
            spans[-1] = VersionSpan(piece.version, spans[-1].tokens + len(piece.ids))
        elif piece.ids:
            spans.append(VersionSpan(piece.version, len(piece.ids)))
    if not spans:
        raise EngineFailure("the engine returned no token")
    ids = np.fromiter(chain.from_iterable(map(_IDS, pieces)), np.int32)
    return ids, np.fromiter(chain.from_iterable(map(_LOGPROBS, pieces)), np.float32), tuple(spans)


def _top_of(pieces: Sequence[SampledTokens], tokens: int, number: int) -> TopTokens:
    """Return the `number` most probable tokens at each position of a reply."""
    rows = list(chain.from_iterable(map(_TOP, pieces)))
    if len(rows) != tokens:
        raise UnsupportedField("the engine of this policy does not report top_logprobs", "top_logprobs")
    ids, logprobs = np.zeros((tokens, number), np.int32), np.full((tokens, number), -np.inf, np.float32)
    for place, row in enumerate(rows):
        if row:
            ids[place, : len(row)], logprobs[place, : len(row)] = zip(*row, strict=True)
    return TopTokens(ids, logprobs)
