"""Load of a training queue: waiting requests, and tokens computed per tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLoad:
    """One tenant of a queue.

    Attributes:
        weight: its relative share.
        waiting: requests without an answer.
        longest_wait: seconds since its oldest waiting request arrived; 0.0: no request waits.
        tokens: computed for it since it joined; each request without tokens counts a fixed number.
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
        """Return the record with `tokens` added."""
        return replace(self, tokens=self.tokens + tokens)

    def with_waiting(self, waits: Sequence[float]) -> TenantLoad:
        """Return the record with the waiting times of its requests, in seconds."""
        return replace(self, waiting=len(waits), longest_wait=max(waits, default=0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLoad:
    """The load of a queue, as its tenants see it.

    Attributes:
        passes: forward and backward passes so far.
        merged_passes: passes with rows of several policies.
    """

    tenants: tuple[TenantLoad, ...]
    passes: int
    merged_passes: int
