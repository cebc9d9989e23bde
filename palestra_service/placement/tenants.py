"""Tenants in placement: their quotas, usage, and shares of the cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from palestra.config.budget import HOUR_MS, units_of
from palestra_control.jobs import SHARES
from palestra_control.wire import QuotaBody
from palestra_service.placement.fitting import Amounts

SERVICE = ""  # the tenant of what base servers hold; no tenant of the control plane is called so
MICRO = units_of(1e-6)  # units of money in a millionth of the currency
KINDS = ("CPUs", "GPUs", "GiB", "jobs")
CPUS, GPUS, MEMORY, JOBS = range(4)
UNITS = (SHARES, SHARES, 1024, 1)  # the counted amount that is one CPU, GPU, GiB or job


class Quota(QuotaBody):
    """The most that a tenant may use at the same time, and its budget; None: unlimited."""

    @property
    def budget(self) -> tuple[int | None, int | None, int | None]:
        """Return tokens, millionths of the currency, and milliseconds of the budget."""
        money = None if self.money is None else units_of(self.money) // MICRO
        return self.tokens, money, None if self.hours is None else int(self.hours * HOUR_MS)

    @property
    def has_budget(self) -> bool:
        """Return whether jobs of the tenant have a budget."""
        return any(amount is not None for amount in self.budget)

    @property
    def limits(self) -> tuple[int | None, ...]:
        """Return the limits as whole numbers, in the order of KINDS."""
        given = (self.cpus, self.gpus, self.memory_gib, self.jobs)
        return tuple(None if n is None else int(n * unit + 1e-6) for n, unit in zip(given, UNITS, strict=True))

    @property
    def in_words(self) -> str:
        """Describe the quota: `8 CPUs, 2 GPUs`, or `none`."""
        parts = [format_amount(limit, kind) for kind, limit in enumerate(self.limits) if limit is not None]
        parts += [] if self.adapters is None else [f"{self.adapters} adapters"]
        parts += [] if self.weight is None else [f"weight {self.weight:g}"]
        budget = {"money": self.money, "hours": self.hours, "tokens": self.tokens}
        parts += [f"{amount:,} {name}" for name, amount in budget.items() if amount is not None]
        return ", ".join(parts) or "none"


class QuotaReservation(NamedTuple):
    """The part of a tenant's quota reserved for its first job that could not start.

    Attributes:
        needs: in the order of KINDS.
    """

    name: str
    needs: tuple[int, ...]


class TenantUsage:
    """One tenant's use of the cluster during a decision.

    Attributes:
        limits: of the quota, in the order of KINDS.
        used: in the order of KINDS.
        claim: set when a job of the tenant could not start; None: not set.
    """

    def __init__(self, tenant: str, quota: Quota, total: Amounts) -> None:
        """Begin without usage. `total`: resources of the whole cluster, for shares."""
        self.tenant, self.limits, self._total = tenant, quota.limits, total
        self.used = [0, 0, 0, 0]
        self._lasting = [0, 0, 0, 0]  # the part of `used` that endless jobs hold
        self.claim: QuotaReservation | None = None

    @property
    def dominant_share(self) -> float:
        """Return the largest of the tenant's shares of CPUs, GPUs and memory.

        Equal shares are equal floats, because division is correctly rounded; so the order of tenants is exact.
        """
        return max((used / all_ for used, all_ in zip(self.used, self._total, strict=False) if all_), default=0.0)

    def hold(self, needs: Amounts, ends: float | None) -> None:
        """Add a job with resources. `ends`: expected end; infinite: it runs until it is stopped; None: unknown."""
        self.used = [used + need for used, need in zip(self.used, (*needs, 1), strict=True)]
        if ends == math.inf:
            self._lasting = [held + need for held, need in zip(self._lasting, (*needs, 1), strict=True)]

    def will_allow(self, needs: Amounts) -> bool:
        """Return whether the quota allows a job when all jobs that ever end have ended."""
        rows = zip(self.limits, self._lasting, (*needs, 1), strict=True)
        return all(limit is None or not need or held + need <= limit for limit, held, need in rows)

    def refusal(self, needs: Amounts) -> str | None:
        """Return why the quota can never allow a job; None: it can. A quota of 0 jobs is a pause and refuses none."""
        for kind in (GPUS, CPUS, MEMORY):
            limit, need = self.limits[kind], needs[kind]
            if limit is not None and need > limit:
                most = in_units(limit, UNITS[kind])
                return f"needs {format_amount(need, kind)}; the quota of tenant {self.tenant} is {most}"
        return None

    def obstacle(self, needs: Amounts) -> str | None:
        """Return why the quota does not allow a job now; None: it does."""
        for kind, unit, limit, used, need in zip(KINDS, UNITS, self.limits, self.used, (*needs, 1), strict=True):
            if limit is not None and need and used + need > limit:
                text = f"quota of tenant {self.tenant}: {in_units(used, unit)} of {in_units(limit, unit)} {kind}"
                return text if used >= limit else f"{text}, and it needs {in_units(need, unit)}"
        return None

    def disturbs(self, needs: Amounts) -> QuotaReservation | None:
        """Return the reservation whose part of the quota a job would use; None: it uses none."""
        if self.claim is None:
            return None
        rows = zip(self.limits, self.used, self.claim.needs, (*needs, 1), strict=True)
        if any(limit is not None and need and used + first + need > limit for limit, used, first, need in rows):
            return self.claim
        return None


def in_units(amount: int, unit: int) -> str:
    """Format a counted amount without trailing zeros."""
    return f"{amount / unit:.4f}".rstrip("0").rstrip(".")


def format_amount(amount: int, kind: int) -> str:
    """Format an amount with its name: `2 GPUs`, `0.5 GPU`, `16 GiB`."""
    name = KINDS[kind] if kind == MEMORY or amount > UNITS[kind] else KINDS[kind][:-1]
    return f"{in_units(amount, UNITS[kind])} {name}"


def format_needs(needs: Sequence[int]) -> str:
    """Format needs without zeros: `2 GPUs, 8 CPUs and 16 GiB`."""
    parts = [format_amount(needs[kind], kind) for kind in (GPUS, CPUS, MEMORY) if needs[kind]]
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
