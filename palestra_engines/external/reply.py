"""A reply of a server, checked token by token, with the exact version of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palestra.engine.base import EngineRequest
from palestra.errors import EngineFailure
from palestra.terminal import one_line_of
from palestra.types.calls import PolicyVersion, SampledTokens, VersionSpan
from palestra_engines.external.api import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyBounds:
    """Limits of every reply of a policy.

    Attributes:
        stop_ids: stop tokens, without those of the request.
        max_context: largest prompt and reply together, in tokens.
    """

    vocab_size: int
    stop_ids: frozenset[int]
    max_context: int


class StreamedReply:
    """The tokens of one reply, as they arrive.

    A server reports only with the last token which version sampled which tokens. If no update has begun since the
    request was sent, all tokens are of the initial version, and are passed on immediately; afterwards they are kept
    until the server's report.
    """

    def __init__(self, request: EngineRequest, began: PolicyVersion, bounds: ReplyBounds) -> None:
        """Expect the first token. `began` is the version of the weights when the request was sent."""
        self._began, self._vocab = began, bounds.vocab_size
        self._stops = bounds.stop_ids | set(request.sampling.stop_ids)
        self._most = request.sampling.max_tokens
        self._room = bounds.max_context - len(request.prompt.ids)
        self._top = request.sampling.top_logprobs
        self._kept: list[Chunk] = []
        self._passed = self._count = 0
        self._last: int | None = None  # token
        self._finished = False

    def take(self, chunk: Chunk, sent: Sequence[PolicyVersion]) -> Iterator[SampledTokens]:
        """Yield the tokens that one more chunk makes certain. `sent` are the versions sent to the server since the
        request.
        """
        self._check(chunk)
        self._count += len(chunk.ids)
        self._last = chunk.ids[-1] if chunk.ids else self._last
        if chunk.ids:
            self._kept.append(chunk)
        if chunk.finish is not None:
            self._check_end(chunk.finish)
            self._finished = True
            if sent and chunk.versions is None:
                raise EngineFailure("new weights came within a reply, and the engine does not say where")
            yield from self._split(chunk.versions, sent)
        elif not sent:
            yield from self._pass_on((VersionSpan(self._began, self._count - self._passed),))

    def check_finished(self) -> None:
        """Raise EngineFailure if the server closed the stream before the reply was over."""
        if not self._finished:
            raise EngineFailure(f"the engine ended a reply after {self._count} tokens without saying why")

    def _check(self, chunk: Chunk) -> None:
        """Refuse ids and logprobs that no sampler of this policy can have sampled."""
        if self._finished:
            raise EngineFailure("the engine went on after the end of a reply")
        if len(chunk.ids) != len(chunk.logprobs) or (self._top and len(chunk.top) != len(chunk.ids)):
            raise EngineFailure(f"the engine sent {len(chunk.ids)} tokens with {len(chunk.logprobs)} logprobs")
        if self._count + len(chunk.ids) > self._most:
            raise EngineFailure(f"the engine sampled more than the {self._most} tokens that it was asked for")
        for token, logprob in zip(chunk.ids, chunk.logprobs, strict=True):
            # JSON has 1.5 and true where an id is expected, and an array would make 1 of either.
            if type(token) is not int or not 0 <= token < self._vocab:
                raise EngineFailure(
                    f"the engine sampled token {one_line_of(token)}, and the policy's model has {self._vocab}; is it "
                    "another model?"
                )
            if not math.isfinite(logprob) or logprob > 0:
                raise EngineFailure(f"the engine says that the logprob of token {token} is {logprob}")
        for token, logprob in (pair for each in chunk.top for pair in each):
            if not 0 <= token < self._vocab or math.isnan(logprob) or logprob > 0:
                raise EngineFailure(
                    f"the engine says that the logprob of the probable token {one_line_of(token)} is {logprob}"
                )

    def _check_end(self, finish: str) -> None:
        """Refuse an end that the request does not explain: the reply was aborted, say, or cut."""
        if finish == "stop" and self._last in self._stops:
            return
        if finish == "length" and self._count >= min(self._most, self._room):
            return
        ended = f"the engine ended a reply after {self._count} of at most {self._most} tokens"
        raise EngineFailure(f"{ended} for the reason {one_line_of(repr(finish))}")

    def _split(self, said: tuple[VersionSpan, ...] | None, sent: Sequence[PolicyVersion]) -> Iterator[SampledTokens]:
        """Yield the kept tokens, split by the versions from the server."""
        spans = (VersionSpan(self._began, self._count),) if said is None else said
        if sum(span.tokens for span in spans) != self._count:
            raise EngineFailure(f"the engine names the versions of other than the reply's {self._count} tokens")
        if self._passed and (spans[0].version != self._began or spans[0].tokens < self._passed):
            raise EngineFailure(
                f"the engine says that version {one_line_of(spans[0].version)} has sampled what was sampled from "
                f"{self._began}"
            )
        for span in spans:
            if span.version != self._began and span.version not in sent:
                raise EngineFailure(
                    f"the engine names the version {one_line_of(span.version)}, which it did not have meanwhile"
                )
        (first, *others), passed = spans, self._passed
        yield from self._pass_on((VersionSpan(first.version, first.tokens - passed), *others))

    def _pass_on(self, spans: tuple[VersionSpan, ...]) -> Iterator[SampledTokens]:
        """Yield all kept tokens, a piece for each span."""
        kept, self._kept = self._kept, []
        ids = [token for chunk in kept for token in chunk.ids]
        logprobs = [logprob for chunk in kept for logprob in chunk.logprobs]
        top = [each for chunk in kept for each in chunk.top] if self._top else []
        self._passed += len(ids)
        at = 0
        for version, tokens in spans:
            end = at + tokens
            if tokens:
                yield SampledTokens(
                    ids=tuple(ids[at:end]),
                    logprobs=tuple(logprobs[at:end]),
                    version=version,
                    top=tuple(each[: self._top] for each in top[at:end]),
                )
            at = end
