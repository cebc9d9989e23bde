"""One reply that is being made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from palestra.grammars.process import Matcher
from palestra.inference.kv_cache import Row
from palestra.schemas.records import Ids, PolicyVersion, SamplingParams

DONE = object()  # delivered after the last token


@dataclass(slots=True, eq=False)
class Request:
    """From its prompt to its last token."""

    policy: str
    prompt: Ids
    sampling: SamplingParams
    deliver: Callable[[Any], object]  # SampledTokens, then DONE or an exception
    matcher: Matcher | None = None
    cancelled: bool = False
    reserved: int = 0  # tokens of the cache that are kept free for it
    version: PolicyVersion | None = None  # of the weights with which it began
    keys: Tensor | None = None  # [layers, 2, key heads, P, head dim] while the prompt is computed
    filled: int = 0  # tokens of the prompt that are in `keys`
    followers: list[Request] = field(default_factory=list)  # of the same prompt, which is computed once
    hidden: Tensor | None = None  # [hidden] of the prompt's last token, until the first token is sampled
    row: Row | None = None  # its place in the cache while tokens are sampled
    reply: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)  # of the reply's tokens, where penalties need them

    @property
    def last(self) -> int:
        """The newest token, whose keys are not computed yet."""
        return self.reply[-1]

    def stops_at(self, token: int, stops: frozenset[int]) -> bool:
        """Whether the reply is over with this token."""
        if len(self.reply) >= self.sampling.max_tokens:
            return True
        return token in stops or token in self.sampling.stop_ids

    def banned(self, stops: frozenset[int]) -> tuple[int, ...]:
        """Tokens that can't be sampled yet."""
        if len(self.reply) >= self.sampling.min_tokens:
            return ()
        return (*stops, *self.sampling.stop_ids)
