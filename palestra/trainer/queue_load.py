"""What waits in a queue of training requests, and what was computed for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLoad:
    """One tenant of a queue.

    Attributes:
        tenant: its name.
        weight: its share beside those of others.
        waiting: requests without an answer.
        longest_wait: seconds since the oldest of them came; 0.0: there is none.
        tokens: computed for it since it came, counting each other request as some.
    """

    tenant: str
    weight: float
    waiting: int = 0
    longest_wait: float = 0.0
    tokens: int = 0

    def with_weight(self, weight: float) -> TenantLoad:
        """Return the record with another weight."""
        return replace(self, weight=weight)

    def with_tokens(self, tokens: int) -> TenantLoad:
        """Return the record with so many tokens more."""
        return replace(self, tokens=self.tokens + tokens)

    def with_waiting(self, waits: Sequence[float]) -> TenantLoad:
        """Return the record with the seconds for which its requests have been waiting."""
        return replace(self, waiting=len(waits), longest_wait=max(waits, default=0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLoad:
    """A queue, as its tenants see it.

    Attributes:
        tenants: one record each.
        passes: through a model, so far.
        merged_passes: of these, with rows of several policies.
    """

    tenants: tuple[TenantLoad, ...]
    passes: int
    merged_passes: int
