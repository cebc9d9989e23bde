"""Chooses the next tenant: deficit round robin by tokens (Shreedhar and Varghese 1995), with weights.

In each round a tenant of weight w may use w times the quantum. Work is not split, so a tenant may overdraw by less than
one piece; the next round subtracts it. A round ends when no waiting tenant has tokens left. Within a round, a tenant is
served until its tokens or its work are used up: switching adapters more often would write more of them to disk. A
tenant that arrives with work is served first (MacGregor and Shi 2000; RFC 8290): its share is the same, but short work
finishes soon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    """A tenant's allowance and remaining tokens in a round."""

    whole: float
    left: float


class FairShares:
    """The tokens of all tenants in the present round."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self._accounts: dict[str, _Account] = {}
        self._order: list[str] = []  # tenants that had work when one was chosen last

    def add(self, tenant: str, weight: float) -> None:
        """Add a tenant, or change its weight from the next round on."""
        whole = weight * self.quantum
        self._accounts.setdefault(tenant, _Account(whole, whole)).whole = whole

    def remove(self, tenant: str) -> None:
        """Forget a tenant."""
        self._accounts.pop(tenant, None)

    def choose(self, waiting: Sequence[str]) -> str:
        """Return the tenant to serve next; begin a new round if no waiting tenant has tokens left.

        Among new tenants the first is served first.
        """
        come = [tenant for tenant in waiting if tenant not in self._order]
        self._order = come + [tenant for tenant in self._order if tenant in waiting]
        if not any(self.may_use(tenant) for tenant in waiting):
            self._begin_rounds(waiting)
        return next(tenant for tenant in self._order if self.may_use(tenant))

    def may_use(self, tenant: str) -> bool:
        """Return whether a tenant has tokens left in this round."""
        return self._accounts[tenant].left > 0

    def charge(self, tenant: str, tokens: int) -> None:
        """Subtract used tokens from a tenant's allowance."""
        self._accounts[tenant].left -= tokens

    def _begin_rounds(self, waiting: Sequence[str]) -> None:
        """Begin as many rounds as it takes until a tenant that waits has tokens left."""
        rounds = min(math.floor(-self._accounts[tenant].left / self._accounts[tenant].whole) + 1 for tenant in waiting)
        for account in self._accounts.values():
            account.left = min(account.left + rounds * account.whole, account.whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLoad:
    """One tenant of a queue.

    Attributes:
        longest_wait: seconds since its oldest waiting request arrived; 0.0: no request waits.
    """

    tenant: str
    weight: float
    waiting: int = 0
    longest_wait: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLoad:
    """The load of a queue, as its tenants see it."""

    tenants: tuple[TenantLoad, ...]
    passes: int
    merged_passes: int
