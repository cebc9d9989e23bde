"""Which tenant is served next: deficit round robin by tokens (Shreedhar and Varghese 1995), with weights.

In each round a tenant of weight w may use w times the quantum. A piece of work is not cut to fit, so a tenant may use
more by less than one piece, which the next round takes off. A round ends when no tenant that waits has tokens left.
Within a round a tenant is served until it has used its tokens, or has no work left, because adapters that take turns
more often may have to be written to disk and read again. One that comes with work goes before those that are there
already (MacGregor and Shi 2000; RFC 8290): what it may use in the round is the same, but little work is done soon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    """What one tenant may use in a round, and what is left of it, in tokens."""

    whole: float
    left: float


class FairShares:
    """The tokens of all tenants in the present round."""

    def __init__(self, quantum: int) -> None:
        """Begin without tenants.

        Args:
            quantum: tokens of a tenant of weight 1 in a round; positive.
        """
        self.quantum = quantum
        self._accounts: dict[str, _Account] = {}
        self._order: list[str] = []  # tenants that had work when one was chosen last

    def add(self, tenant: str, weight: float) -> None:
        """Add a tenant, or change the weight of one from the next round on.

        Args:
            weight: its share beside those of others; positive.
        """
        whole = weight * self.quantum
        self._accounts.setdefault(tenant, _Account(whole, whole)).whole = whole

    def remove(self, tenant: str) -> None:
        """Forget a tenant."""
        self._accounts.pop(tenant, None)

    def choose(self, waiting: Sequence[str]) -> str:
        """Return which tenant is served next. A new round begins if none of them has tokens left.

        Args:
            waiting: tenants with work, at least one; of those that have come since the last call the first goes first.
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
        """Take tokens that are used for a tenant off what it has left."""
        self._accounts[tenant].left -= tokens

    def _begin_rounds(self, waiting: Sequence[str]) -> None:
        """Begin as many rounds as it takes until a tenant that waits has tokens left."""
        rounds = min(math.floor(-self._accounts[tenant].left / self._accounts[tenant].whole) + 1 for tenant in waiting)
        for account in self._accounts.values():
            account.left = min(account.left + rounds * account.whole, account.whole)
