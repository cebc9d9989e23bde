"""Whose turn it is: priority with aging, then the tenant that has least, then the order of submission.

**Aging.** With every `aging_seconds` that it waits, a job rises by one priority class; one that would rise above "high"
is overdue, and goes before all that are not. Overdue jobs don't look at shares: the one that has been so for longest
is first. A job waits from its submission, or from the last start of a running job that its tenant had submitted before
it: a queue of a thousand jobs ages at its head, and can't push other tenants aside.

**Shares.** Within a class it is the turn of the tenant whose dominant share, the largest of its shares of CPUs, GPUs
and memory, is the smallest (Ghodsi et al., Dominant Resource Fairness, NSDI 2011).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from palestra.scheduler.fitting import RunningJob
from palestra.scheduler.tenants import Account
from palestra.schemas.jobs import PRIORITIES, Priority, Resources

OVERDUE = len(PRIORITIES)  # the class above the highest
CLASSES = {priority: number for number, priority in enumerate(PRIORITIES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """A job that is QUEUED."""

    job_id: str
    tenant: str
    priority: Priority
    submitted_at: float  # stays the same when it is queued again
    needs: Resources
    private: bool = False  # other users of its tenant are not shown its id
    expected_seconds: float | None = None  # how long it will run; None: nobody knows; infinite: until stopped


class Turn(NamedTuple):
    """A job whose turn it is. Turns sort: the smallest comes first."""

    below_overdue: int  # classes between its own, with aging, and OVERDUE
    standing: float  # its tenant's dominant share; of an overdue job the time since which it is
    submitted_at: float
    job_id: str
    job: WaitingJob
    line: Line


class Line:
    """A tenant's waiting jobs."""

    def __init__(
        self, account: Account, jobs: Iterable[WaitingJob], running: Iterable[RunningJob], aging: float
    ) -> None:
        """Take the jobs of one tenant, in any order."""
        self.account, self._aging = account, aging
        ordered = sorted(jobs, key=lambda job: (job.submitted_at, job.job_id), reverse=True)
        self._classes = [[job for job in ordered if job.priority == priority] for priority in PRIORITIES]
        starts = sorted((job.submitted_at, job.since) for job in running)
        self._submitted = [submitted_at for submitted_at, _ in starts]
        self._last_start = list(accumulate((since for _, since in starts), max))  # of these and those before
        self._served_from = float("inf")  # the first submission of those that start now

    def first(self, now: float) -> Turn | None:
        """Whose turn it is among these."""
        share = self.account.dominant_share
        return min((self._turn(jobs[-1], share, now) for jobs in self._classes if jobs), default=None)

    def take(self, job: WaitingJob) -> None:
        """It had its turn."""
        self._classes[CLASSES[job.priority]].pop()

    def start(self, job: WaitingJob) -> None:
        """It starts now."""
        self._served_from = min(self._served_from, job.submitted_at)

    def next_rise(self, job: WaitingJob, now: float) -> float | None:
        """When it will be in a higher class; None: it is in the highest."""
        rise = self._waits_since(job, now)
        for _ in range(CLASSES[job.priority], OVERDUE):
            if (rise := rise + self._aging) > now:
                return rise
        return None

    def _turn(self, job: WaitingJob, share: float, now: float) -> Turn:
        rise, below = self._waits_since(job, now), OVERDUE - CLASSES[job.priority]
        while below and now >= (rise := rise + self._aging):
            below -= 1
        return Turn(below, share if below else rise, job.submitted_at, job.job_id, job, self)

    def _waits_since(self, job: WaitingJob, now: float) -> float:
        if job.submitted_at >= self._served_from:
            return now
        before = bisect_right(self._submitted, job.submitted_at)
        return max(job.submitted_at, self._last_start[before - 1]) if before else job.submitted_at


def in_order(lines: Sequence[Line], now: float) -> Iterator[Turn]:
    """Every waiting job once. What the caller does with one (its tenant's share grows) counts for the next."""
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
