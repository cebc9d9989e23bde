"""A reply while it is sampled: token by token to text, to where it ends, and to its message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from palestra.chat import MessageDelta, PlainTextStream, Renderer, Reply
from palestra.chat.base import NOTHING
from palestra.chat.stop_strings import StopStrings
from palestra.chat.text_stream import TextStream
from palestra.errors import EngineFailure
from palestra.inference.base import Engine, EngineRequest
from palestra.schemas.records import FinishReason, Ids, SampledTokens, SamplingParams, TokenSequence, VersionSpan
from palestra.session.context import PolicyRuntime
from palestra.session.request import GenerationRequest, ReplyPiece

CALL_END = "</tool_call>"  # what `Chat.stop` says of a reply that its only call ended


class ReplyReader:
    """Where a reply ends besides at a stop token or its limit, and what is certain of its message so far."""

    def __init__(
        self, request: GenerationRequest, renderer: Renderer, min_tokens: int, prompt_ids: Ids, call_ids: str
    ) -> None:
        """Begin with an empty reply.

        Args:
            request: what was asked for.
            renderer: of the model.
            min_tokens: how many tokens are sampled before a stop string counts.
            prompt_ids: [P].
            call_ids: what the ids of tool calls start with.
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
        self.stop: str | None = None  # the string that ended it

    def take(self, token: int) -> MessageDelta:
        """Return what is certain of the message with this token. If `stop` is set after it, it was the last."""
        self._tokens += 1
        text = self._text.add(token)
        return self._take(text) if text else NOTHING

    def finish(self, ids: Ids) -> tuple[MessageDelta, Reply]:
        """Return what was not certain before, and the reply; `ids` are all that were taken, [C]."""
        last = self._take(self._text.end()) if self.stop is None else NOTHING
        if self.stop is None:
            last += self._feed(self._stops.end())
        rest, reply = self._stream.finish(without_own_stop(ids, self._request, self._renderer), self.stop is not None)
        return last + rest, reply

    def _take(self, text: str) -> MessageDelta:
        if self._tokens > self._min_tokens:
            text = self._stops.feed(text)
            self.stop = self._stops.found
        return self._feed(text)

    def _feed(self, text: str) -> MessageDelta:
        delta = self._stream.feed(text)
        if self._stream.over:
            self.stop = CALL_END
        return delta


def without_own_stop(ids: Ids, request: GenerationRequest, renderer: Renderer) -> Ids:
    """Return the ids of a reply without a stop token of the caller's own at its end, which is not part of it."""
    own = len(ids) and int(ids[-1]) in request.stop_token_ids and int(ids[-1]) not in renderer.stop_ids
    return ids[:-1] if own else ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """What the engine sampled, and the message that it stands for."""

    ids: Ids  # [C]
    logprobs: NDArray[np.float32]  # [C]
    versions: tuple[VersionSpan, ...]
    reply: Reply
    finish_reason: FinishReason
    stop: str | None  # the string that ended it; None: it was a stop token, or the limit


async def sample_reply(
    request: GenerationRequest,
    runtime: PolicyRuntime,
    prompt: TokenSequence,
    sampling: SamplingParams,
    call_ids: str,
    tell: Callable[[ReplyPiece], None] | None,
) -> SampledReply:
    """Have a reply sampled, and read it: piece by piece where there is a listener, or where its text may end it.

    Args:
        request: what was asked for.
        runtime: of the request's policy.
        prompt: [P] ids, with their images.
        sampling: how to sample.
        call_ids: what the ids of tool calls start with.
        tell: is called with each piece of the reply. None: there is no listener.

    Raises:
        EngineFailure: the engine could not finish, or gave no token.
        GrammarRefused: the engine refused a token's grammar.
    """
    renderer = runtime.renderer
    reader = None
    if tell is not None or request.stop or request.prompt is not None or not request.parallel_tool_calls:
        reader = ReplyReader(request, renderer, sampling.min_tokens, prompt.ids, call_ids)
    asked = EngineRequest(policy=request.policy, prompt=prompt, sampling=sampling)
    pieces = await _sample(runtime.engine, asked, reader, tell)
    ids, logprobs, versions = _join(pieces)
    if reader is None:
        own = without_own_stop(ids, request, renderer)
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
        versions=versions,
        reply=reply,
        finish_reason="stop" if stopped else "length",
        stop=stop,
    )


async def _sample(
    engine: Engine,
    request: EngineRequest,
    reader: ReplyReader | None,
    tell: Callable[[ReplyPiece], None] | None,
) -> list[SampledTokens]:
    """Have a reply sampled; with a `reader` only until the reader finds the end, where the engine is stopped."""
    stream = engine.generate(request)
    if reader is None:
        return [piece async for piece in stream]
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
    return pieces


def _join(pieces: Sequence[SampledTokens]) -> tuple[Ids, NDArray[np.float32], tuple[VersionSpan, ...]]:
    """Return the ids [C], logprobs [C] and versions of all pieces.

    Raises:
        EngineFailure: there is no token.
    """
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
    return np.array(ids, np.int32), np.array(logprobs, np.float32), tuple(spans)
