"""How much memory keys and values may take: requests that have begun come first, kept prefixes get what is left.

vLLM cuts its cache into blocks, hands them out as replies grow, and preempts a request when there are none left. Here
a request reserves what its longest reply takes before it begins, so that nothing is ever preempted: a preempted reply
would be computed again in other passes, and round differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from palestra.engine.embedded.prefix_cache import PrefixCache


@dataclass(slots=True)
class KVBudget:
    """The bytes that the keys and values of an engine's models share."""

    total: int
    reserved: int = 0  # by requests that have begun
    prefixes: list[tuple[PrefixCache, int]] = field(default_factory=list)  # of each policy, with the bytes of a token

    @property
    def kept(self) -> int:
        """Bytes of the keys and values that are kept for prompts to come, of all policies together."""
        return sum(cache.tokens * each for cache, each in self.prefixes)

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a request, and drop prefixes that are in the way. False: requests leave too few."""
        if self.reserved + size > self.total:
            return False
        for cache, each in self.prefixes:
            too_many = self.kept + self.reserved + size - self.total
            if too_many > 0:
                cache.shrink(cache.tokens - -(-too_many // each))
        self.reserved += size  # last: `Engine.load` reads from other threads, and never sees more than `total`
        return True

    def release(self, size: int) -> None:
        """Return the bytes that `reserve` took for a request that has ended, so that others may begin."""
        self.reserved -= size

    def room_for(self, prefixes: PrefixCache, each: int) -> int:
        """Return how many tokens a policy's prefixes may have in all, if a token takes `each` bytes."""
        others = self.kept - prefixes.tokens * each
        return max(0, (self.total - self.reserved - others) // each)
