"""The memory budget of keys and values: running requests first, cached prefixes get the rest.

vLLM allocates its cache in blocks as replies grow, and preempts a request when there are none left. Here a request
reserves memory for its longest possible reply before it begins, so nothing is preempted: a preempted reply would be
recomputed in other passes, and round differently.
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
        """Return the bytes of cached prefixes, of all policies together."""
        return sum(cache.tokens * each for cache, each in self.prefixes)

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a request, evicting cached prefixes; False: other requests leave too few."""
        if self.reserved + size > self.total:
            return False
        for cache, each in self.prefixes:
            too_many = self.kept + self.reserved + size - self.total
            if too_many > 0:
                cache.shrink(cache.tokens - -(-too_many // each))
        self.reserved += size  # last: `Engine.load` reads from other threads, and never sees more than `total`
        return True

    def release(self, size: int) -> None:
        """Release the reservation of a request that has ended."""
        self.reserved -= size

    def room_for(self, prefixes: PrefixCache, each: int) -> int:
        """Return how many tokens a policy's cached prefixes may have in all, at `each` bytes per token."""
        others = self.kept - prefixes.tokens * each
        return max(0, (self.total - self.reserved - others) // each)
