"""What a tenant holds, what it may hold, and its share of the cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palestra.scheduler.fitting import Amounts
from palestra.schemas.jobs import SHARES

KINDS = ("CPUs", "GPUs", "GiB", "jobs")
CPUS, GPUS, MEMORY, JOBS = range(4)
UNITS = (SHARES, SHARES, 1024, 1)  # how much of what is counted is one of these


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What a tenant may hold at the same time; None: as much as there is."""

    jobs: int | None = None
    cpus: float | None = None
    gpus: float | None = None
    memory_gib: float | None = None

    @property
    def limits(self) -> tuple[int | None, ...]:
        """As it is counted, in the order of KINDS."""
        given = (self.cpus, self.gpus, self.memory_gib, self.jobs)
        return tuple(None if n is None else int(n * unit + 1e-6) for n, unit in zip(given, UNITS, strict=True))

    @property
    def told(self) -> str:
        """`8 CPUs, 2 GPUs`, or `none`."""
        parts = [told_one(limit, kind) for kind, limit in enumerate(self.limits) if limit is not None]
        return ", ".join(parts) or "none"


class Claim(NamedTuple):
    """The first job of a tenant that could not start; its part of the quota is kept for it."""

    name: str  # what other users of the tenant are told of it
    needs: tuple[int, ...]  # in the order of KINDS


class Account:
    """One tenant's side of a decision."""

    def __init__(self, tenant: str, quota: Quota, total: Amounts) -> None:
        """`total` is what the whole cluster has."""
        self.tenant, self.limits, self._total = tenant, quota.limits, total
        self.used = [0, 0, 0, 0]  # in the order of KINDS
        self._lasting = [0, 0, 0, 0]  # of these what endless jobs hold
        self.claim: Claim | None = None  # set by whoever decides

    @property
    def dominant_share(self) -> float:
        """The largest of its shares of CPUs, GPUs and memory; equal ones are equal floats: division rounds right."""
        return max((used / all_ for used, all_ in zip(self.used, self._total, strict=False) if all_), default=0.0)

    def hold(self, needs: Amounts, ends: float | None) -> None:
        """One more job of this tenant runs; `ends` is infinite for one that runs until somebody stops it."""
        self.used = [used + need for used, need in zip(self.used, (*needs, 1), strict=True)]
        if ends == math.inf:
            self._lasting = [held + need for held, need in zip(self._lasting, (*needs, 1), strict=True)]

    def will_allow(self, needs: Amounts) -> bool:
        """Whether the quota allows this when all that end have ended."""
        rows = zip(self.limits, self._lasting, (*needs, 1), strict=True)
        return all(limit is None or not need or held + need <= limit for limit, held, need in rows)

    def refusal(self, needs: Amounts) -> str | None:
        """Why the quota can never allow this; None: it can. No jobs at all is a pause and refuses nothing."""
        for kind in (GPUS, CPUS, MEMORY):
            limit, need = self.limits[kind], needs[kind]
            if limit is not None and need > limit:
                most = told(limit, UNITS[kind])
                return f"needs {told_one(need, kind)}; the quota of tenant {self.tenant} is {most}"
        return None

    def obstacle(self, needs: Amounts) -> str | None:
        """Why the quota does not allow this now; None: it does."""
        for kind, unit, limit, used, need in zip(KINDS, UNITS, self.limits, self.used, (*needs, 1), strict=True):
            if limit is not None and need and used + need > limit:
                text = f"quota of tenant {self.tenant}: {told(used, unit)} of {told(limit, unit)} {kind}"
                return text if used >= limit else f"{text}, and it needs {told(need, unit)}"
        return None

    def disturbs(self, needs: Amounts) -> Claim | None:
        """The claim from whose part of the quota this would take; None: from none."""
        if self.claim is None:
            return None
        rows = zip(self.limits, self.used, self.claim.needs, (*needs, 1), strict=True)
        if any(limit is not None and need and used + first + need > limit for limit, used, first, need in rows):
            return self.claim
        return None


def told(amount: int, unit: int) -> str:
    """A counted amount as people write it."""
    return f"{amount / unit:.4f}".rstrip("0").rstrip(".")


def told_one(amount: int, kind: int) -> str:
    """`2 GPUs`, `0.5 GPU`, `16 GiB`; `kind` is a place in KINDS."""
    name = KINDS[kind] if kind == MEMORY or amount > UNITS[kind] else KINDS[kind][:-1]
    return f"{told(amount, UNITS[kind])} {name}"


def told_needs(needs: Sequence[int]) -> str:
    """`2 GPUs, 8 CPUs and 16 GiB`; what is not needed is left out."""
    parts = [told_one(needs[kind], kind) for kind in (GPUS, CPUS, MEMORY) if needs[kind]]
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
