"""A request while it is answered, from its prompt to its last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from palestra.engine.base import EngineRequest
from palestra.engine.embedded.kv_cache import Row
from palestra.grammars.matcher import Matcher
from palestra.tokens import TokenRun
from palestra.types.calls import PolicyVersion, SamplingParams

DONE = object()  # delivered after the last token


class Unprepared(Exception):
    """A request could not be prepared for its first pass."""

    def __init__(self, request: RunningRequest, cause: Exception) -> None:
        super().__init__(str(cause))
        self.request, self.cause = request, cause


@dataclass(slots=True, eq=False)
class RunningRequest:
    """An `EngineRequest` with its state: waiting, in prefill, or decoding."""

    asked: EngineRequest
    deliver: Callable[[Any], object]  # SampledTokens, then DONE or an exception
    prompt: TokenRun = field(init=False)  # [P]
    matcher: Matcher | None = None
    cancelled: bool = False
    reserved: int = 0  # bytes of keys and values that are kept free for it
    version: PolicyVersion | None = None  # of the weights with which it began
    # While the prompt is prefilled:
    keys: Tensor | None = None  # [layers, 2, key heads, P, head dim]
    positions: Tensor | None = None  # [P] or [3, P], of the prompt, see `CausalLM.positions`
    prefilled: int = 0  # tokens of the prompt that are in `keys`
    followers: list[RunningRequest] = field(default_factory=list)  # with the same prompt, which is computed once
    hidden: Tensor | None = None  # [hidden] of the prompt's last token, until the first token is sampled
    # While the reply is decoded:
    row: Row | None = None  # its place in the cache of keys and values
    reply: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)  # of the reply's tokens, where penalties need them

    def __post_init__(self) -> None:
        self.prompt = TokenRun.of(*self.asked.prompt)

    @property
    def policy(self) -> str:
        """Return the name of the sampled policy."""
        return self.asked.policy

    @property
    def sampling(self) -> SamplingParams:
        """Return how the reply is sampled: temperature, limits, seed and grammar."""
        return self.asked.sampling

    @property
    def remaining(self) -> int:
        """Return how many prompt tokens are not prefilled yet."""
        return len(self.prompt) - self.prefilled

    @property
    def group(self) -> tuple[RunningRequest, ...]:
        """Return all requests that wait for this prompt, this one last."""
        return (*self.followers, self)

    @property
    def last(self) -> int:
        """Return the newest token, whose keys are not computed yet."""
        return self.reply[-1]

    def append(self, token: int) -> None:
        """Add a sampled token to the reply."""
        self.reply.append(token)
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self.counts[token] += 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def stops_at(self, token: int, stops: frozenset[int]) -> bool:
        """Return whether the reply ends with this token; `stops` are the policy's stop tokens."""
        if len(self.reply) >= self.sampling.max_tokens:
            return True
        return token in stops or token in self.sampling.stop_ids

    def banned(self, stops: frozenset[int]) -> tuple[int, ...]:
        """Return the tokens that may not be sampled yet: stop tokens before `min_tokens`."""
        if len(self.reply) >= self.sampling.min_tokens:
            return ()
        return (*stops, *self.sampling.stop_ids)

    def promote_follower(self) -> RunningRequest | None:
        """Return the follower that takes over the computed part of the prompt, if there is one."""
        if not self.followers:
            return None
        heir, *others = self.followers
        heir.keys, heir.prefilled, heir.hidden, heir.followers = self.keys, self.prefilled, self.hidden, others
        heir.positions = self.positions
        return heir
