"""The order of turns: priority with aging, the tenant with the smallest share, submission.

**Aging.** With every `aging_seconds` of waiting, a job rises by one priority class. A job that would rise above "high"
is overdue, and goes before all that are not. Overdue jobs ignore shares: the longest overdue is first. A job waits from
its submission, or from the last start of a running job that its tenant had submitted before it: a queue of a thousand
jobs ages at its head, and cannot push other tenants aside.

**Shares.** Within a class it is the turn of the tenant with the smallest dominant share, the largest of its shares of
CPUs, GPUs and memory (Ghodsi et al., Dominant Resource Fairness, NSDI 2011).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from palestra_control.jobs import PRIORITIES, Priority, Resources
from palestra_service.placement.fitting import NOTHING, Amounts, RunningJob, added, total
from palestra_service.placement.tenants import TenantUsage

OVERDUE = len(PRIORITIES)  # the class above the highest
CLASSES = {priority: number for number, priority in enumerate(PRIORITIES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """A QUEUED job, as placement sees it.

    Attributes:
        submitted_at: Unix seconds; unchanged when the job is queued again.
        expected_seconds: of running; None: unknown; infinite: until it is stopped.
        beside: additionally counted for its tenant: its part of a base server, which is held on a node.
    """

    job_id: str
    tenant: str
    priority: Priority
    submitted_at: float
    needs: Resources
    expected_seconds: float | None = None
    beside: Amounts = NOTHING

    @property
    def counts(self) -> Amounts:
        """Return what counts for its tenant."""
        return added(total(self.needs), self.beside)


class QueueEntry(NamedTuple):
    """A job's turn. Turns sort: the smallest is first.

    Attributes:
        below_overdue: classes between the job's own, with aging, and OVERDUE; 0: it is overdue.
        standing: its tenant's dominant share; for an overdue job, since when it is overdue.
    """

    below_overdue: int
    standing: float
    submitted_at: float
    job_id: str
    job: WaitingJob
    line: TenantQueue


class TenantQueue:
    """The waiting jobs of one tenant, by priority and submission."""

    def __init__(
        self, account: TenantUsage, jobs: Iterable[WaitingJob], running: Iterable[RunningJob], aging: float
    ) -> None:
        """Sort the waiting jobs of one tenant. `aging`: seconds of waiting that raise a job by one class."""
        self.account, self._aging = account, aging
        ordered = sorted(jobs, key=lambda job: (job.submitted_at, job.job_id), reverse=True)
        self._classes = [[job for job in ordered if job.priority == priority] for priority in PRIORITIES]
        starts = sorted((job.submitted_at, job.since) for job in running)
        self._submitted = [submitted_at for submitted_at, _ in starts]
        # For each running job, the last start among it and all that were submitted before it.
        self._last_start = list(accumulate((since for _, since in starts), max))
        self._served_from = float("inf")  # the earliest submission among the jobs that start now

    def first(self, now: float) -> QueueEntry | None:
        """Return the turn of the first job; None: no job waits."""
        share = self.account.dominant_share
        return min((self._turn(jobs[-1], share, now) for jobs in self._classes if jobs), default=None)

    def take(self, job: WaitingJob) -> None:
        """Remove a job after its turn."""
        self._classes[CLASSES[job.priority]].pop()

    def start(self, job: WaitingJob) -> None:
        """Record that a job starts now; jobs submitted after it begin to age only now."""
        self._served_from = min(self._served_from, job.submitted_at)

    def next_rise(self, job: WaitingJob, now: float) -> float | None:
        """Return when a job will rise to a higher class; None: it is in the highest."""
        rise = self._waits_since(job, now)
        for _ in range(CLASSES[job.priority], OVERDUE):
            if (rise := rise + self._aging) > now:
                return rise
        return None

    def _turn(self, job: WaitingJob, share: float, now: float) -> QueueEntry:
        rise, below = self._waits_since(job, now), OVERDUE - CLASSES[job.priority]
        while below and now >= (rise := rise + self._aging):
            below -= 1
        return QueueEntry(below, share if below else rise, job.submitted_at, job.job_id, job, self)

    def _waits_since(self, job: WaitingJob, now: float) -> float:
        """Return since when a job waits, which determines its class."""
        if job.submitted_at >= self._served_from:
            return now
        before = bisect_right(self._submitted, job.submitted_at)
        return max(job.submitted_at, self._last_start[before - 1]) if before else job.submitted_at


def in_order(lines: Sequence[TenantQueue], now: float) -> Iterator[QueueEntry]:
    """Yield the turn of every waiting job once, in order.

    The caller may change shares between two turns, by starting a job; the next turn uses them.
    """
    heap = [turn for line in lines if (turn := line.first(now))]
    heapq.heapify(heap)
    while heap:
        turn = heap[0]
        turn.line.take(turn.job)
        yield turn
        following = turn.line.first(now)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, following)
