"""The sampling of a call: what the job fixes, what the caller chooses, and the reply, read while it is sampled."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import numpy as np

from palestra.engine.base import Engine, EngineRequest
from palestra.errors import EngineFailure, ReplyLost, UnsupportedField
from palestra.renderers import MessageDelta, PlainTextStream, Renderer, Reply
from palestra.renderers.base import NOTHING
from palestra.renderers.text_stream import StopStrings, TextStream
from palestra.session.registry import CallInFlight
from palestra.session.request import ReplyPiece
from palestra.types.calls import Ids, SampledTokens, SamplingParams, TopTokens, VersionSpan
from palestra.types.messages import GenerationRequest, SamplingOptions
from palestra.types.records import EpisodeKind

_SEEDS = 2**63
CALL_END = "</tool_call>"  # value of `Chat.stop` for a reply that ended with its only tool call
MOST_ATTEMPTS = 3  # to sample a reply whose beginning is lost with its worker
_IDS, _LOGPROBS, _TOP = attrgetter("ids"), attrgetter("logprobs"), attrgetter("top")

# Fields that change the distribution from which tokens are sampled, with the values that leave it unchanged.
_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(SamplingOptions)}
_RESHAPING = {name: value for name, value in _DEFAULTS.items() if name not in ("stop_ids", "top_logprobs")}
_options = attrgetter(*_DEFAULTS)
reshaping, NEUTRAL = attrgetter(*_RESHAPING), tuple(_RESHAPING.values())


def trainable(call: GenerationRequest, ignore: bool) -> GenerationRequest:
    """Return a request without sampling fields that training episodes do not allow.

    With `ignore` such fields are reset instead of refused. Raises UnsupportedField: a field changes the distribution,
    so the trainer could not compute the sampling probabilities of the tokens.
    """
    asked = [field for field, neutral in _RESHAPING.items() if getattr(call, field) != neutral]
    if asked and not ignore:
        field = asked[0]
        raise UnsupportedField(
            f"{field} is not possible in a training episode: it changes the distribution that tokens are drawn "
            "from, and the trainer, which takes the model's own, would compute other probabilities than those "
            f"sampled with; validation and ad-hoc episodes allow it. Leave {field} out, or set "
            'server.unknown_fields = "ignore" in the job to have it ignored',
            field,
        )
    return replace(call, **{field: _RESHAPING[field] for field in asked}) if asked else call


def sampling_of(call: CallInFlight, kind: EpisodeKind, seed: int) -> SamplingParams:
    """Return a call's sampling parameters: the job's in training, greedy in validation, else the caller's. A caller's
    seed takes precedence over `seed` where it is allowed.
    """
    request, config = call.request, call.runtime.config
    most = min(config.sampling.max_tokens, config.max_context - len(call.prompt.sequence.ids))
    if request.max_tokens is not None:
        most = min(request.max_tokens, most)
    temperature = 0.0 if kind == "validation" else config.sampling.temperature
    if kind == "adhoc":
        temperature = temperature if request.temperature is None else request.temperature
        seed = seed if request.seed is None else (request.seed + call.number) % _SEEDS
    chosen = dict(zip(_DEFAULTS, _options(request), strict=True)) | {"min_tokens": min(request.min_tokens, most)}
    return SamplingParams(
        temperature=temperature, max_tokens=most, seed=seed, grammar=call.constraint.grammar, **chosen
    )


def overruled(call: GenerationRequest, used: SamplingParams, choice: int = 0) -> str | None:
    """Describe the caller's values that the job replaced; None: it kept all."""
    notes = []
    if call.temperature is not None and call.temperature != used.temperature:
        notes.append(f"temperature={used.temperature:g}")
    if call.max_tokens is not None and call.max_tokens != used.max_tokens:
        notes.append(f"max_tokens={used.max_tokens}")
    if call.seed is not None and (call.seed + choice) % _SEEDS != used.seed:
        notes.append("seed=job")
    if reshaping(call) != NEUTRAL:
        for field, neutral in _RESHAPING.items():
            if getattr(call, field) != neutral and getattr(used, field) == neutral:
                notes.append(f"{field}={neutral:g}" if neutral != () else f"{field}=none")
    if call.thinking_budget is not None and call.thinking_budget < used.max_tokens:
        notes.append(f"budget_tokens={used.max_tokens}")
    return ", ".join(notes) or None


class ReplyReader:
    """Parses a reply incrementally, and ends it at a stop string or its first tool call.

    Attributes:
        stop: the stop string that ended the reply, or `CALL_END`; None: the reply has not ended this way.
    """

    def __init__(
        self, request: GenerationRequest, renderer: Renderer, min_tokens: int, prompt_ids: Ids, call_ids: str
    ) -> None:
        """Create a reader of an empty reply. Stop strings before `min_tokens` are ignored; ids of tool calls begin with
        `call_ids`.
        """
        self._request, self._renderer, self._min_tokens = request, renderer, min_tokens
        self._text = TextStream(renderer.vocabulary.decode, {*renderer.stop_ids, *request.stop_ids})
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
        """Return the rest of the message, and the whole reply. `ids` are all added tokens, int32 [C]."""
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
    """Return a reply's ids [C] without the caller's stop token, which is not part of the message. The model's own stop
    tokens are kept.
    """
    own = len(ids) and int(ids[-1]) in request.stop_ids and int(ids[-1]) not in renderer.stop_ids
    return ids[:-1] if own else ids


async def sample_reply(call: CallInFlight, tell: Callable[[ReplyPiece], None] | None = None) -> tuple[str, ...]:
    """Sample the reply of a call into its record, and parse it, incrementally if its text may end it or `tell` is
    called with each piece of it. Return a reason for each malformed tool call. Raises GrammarRefused: the reply's
    grammar took too much time or memory.
    """
    request, renderer, prompt, chat = call.request, call.runtime.renderer, call.prompt.sequence, call.chat
    sampling, engine, reader, call_ids = chat.sampling, call.runtime.engine, None, f"call_{call.seed:016x}"
    piecewise = bool(tell or request.stop or request.prompt is not None or not request.parallel_tool_calls)
    asked = EngineRequest(policy=request.policy, prompt=prompt, sampling=sampling, streamed=piecewise)
    pieces: list[SampledTokens] = []
    for attempt in range(MOST_ATTEMPTS):
        pieces.clear()
        try:
            if piecewise:
                reader = ReplyReader(request, renderer, sampling.min_tokens, prompt.ids, call_ids)
                await _read(engine, asked, reader, tell, pieces)
            else:
                async for piece in engine.generate(asked):
                    pieces.append(piece)
            break
        except BaseException as error:  # what was read of a lost reply is dropped, unless the listener has heard it
            again = isinstance(error, ReplyLost) and not (tell is not None and any(map(_IDS, pieces)))
            if not again or attempt == MOST_ATTEMPTS - 1:
                chat.completion_ids = np.fromiter(chain.from_iterable(map(_IDS, pieces)), np.int32)  # they cost, too
                raise
    chat.versions = _spans(pieces)
    ids = np.fromiter(chain.from_iterable(map(_IDS, pieces)), np.int32)
    chat.logprobs = np.fromiter(chain.from_iterable(map(_LOGPROBS, pieces)), np.float32)
    if sampling.top_logprobs:
        chat.top = _top_of(pieces, len(ids), sampling.top_logprobs)
    if reader is None:
        own = without_own_stop(ids, request, renderer) if request.stop_ids else ids
        reply = renderer.parse(own, lambda: prompt.ids, request.callable_tools, call_ids)
    else:
        rest, reply = reader.finish(ids)
        if tell is not None and rest:
            tell(ReplyPiece(delta=rest))
        chat.stop = reader.stop
    last = int(ids[-1])
    stopped = chat.stop is not None or last in renderer.stop_ids or last in sampling.stop_ids
    chat.completion_ids, chat.reply, chat.finish_reason = ids, reply.message, "stop" if stopped else "length"
    return reply.malformed


async def _read(
    engine: Engine,
    request: EngineRequest,
    reader: ReplyReader,
    tell: Callable[[ReplyPiece], None] | None,
    pieces: list[SampledTokens],
) -> None:
    """Have a reply sampled until the reader finds its end, and add its tokens to `pieces`."""
    stream = engine.generate(request)
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


def _spans(pieces: Sequence[SampledTokens]) -> tuple[VersionSpan, ...]:
    """Return the versions of all pieces together."""
    spans: list[VersionSpan] = []
    for piece in pieces:
        if spans and spans[-1].version == piece.version:
            spans[-1] = VersionSpan(piece.version, spans[-1].tokens + len(piece.ids))
        elif piece.ids:
            spans.append(VersionSpan(piece.version, len(piece.ids)))
    if not spans:
        raise EngineFailure("the engine returned no token")
    return tuple(spans)


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
