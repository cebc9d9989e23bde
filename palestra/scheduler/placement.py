"""Which job starts where: a pure function of what waits, what runs, the nodes, the policy and the time.

Jobs have their turns in the order of `turns`. One that fits starts where the least is left over (`fitting`). For the
first that fits nowhere a node is kept, and what comes behind it starts only where it does not delay it (backfill). A
job that its tenant's quota stops keeps its part of the quota in the same way. Nothing waits for ever:

- a waiting job ages until it is overdue, once the finite number of jobs that its tenant submitted before it are over;
- a finite number of jobs is overdue for longer than it is, so it becomes the first;
- the node kept for an overdue job is chosen without trusting estimates, and the choice settles (`fitting.reserve`).

What can't be promised: room that only opens when a dead node comes back, or when an endless job is stopped.

With W waiting jobs, D different needs among them, S starts and N nodes a call takes O(W log W + (S + D) N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.scheduler.fitting import (
    Amounts,
    GpuShare,
    Holding,
    Node,
    NodeRoom,
    Reservation,
    RunningJob,
    best_fit,
    counted,
    devices_for,
    reserve,
)
from palestra.scheduler.reasons import Shortage, behind, name_of, sizes_of, too_large
from palestra.scheduler.tenants import Account, Claim, Quota
from palestra.scheduler.turns import Line, Turn, WaitingJob, in_order


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the operator has decided."""

    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by tenant; the others have no limits
    starts_at_once: int = 2
    draining: bool = False  # nothing starts
    aging_seconds: float = 1800.0  # waiting for so long raises a job by one priority class
    backfill: bool = True  # False: nothing starts behind a job that waits for room


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A job that starts now, and what it holds from now on, besides CPUs and memory as it needs."""

    job_id: str
    node_id: str
    devices: tuple[GpuShare, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Every waiting job is in exactly one of the first three."""

    starts: tuple[Start, ...]
    waiting: Mapping[str, str]  # reason by job
    impossible: Mapping[str, str]  # reason by job: it can never start, whatever ends
    again_at: float | None  # when the same call could start something, if nothing else happens; None: never


def place(
    queue: Iterable[WaitingJob], running: Iterable[RunningJob], nodes: Iterable[Node], policy: Policy, now: float
) -> Decision:
    """Decide what starts now. The order in which jobs and nodes are given does not matter.

    Call it when a job comes or ends, when a start is over, when a node or the policy changes, at `again_at`, and again
    after a decision that starts something, for that changes whose turn it is.

    Args:
        queue: all jobs that wait.
        running: all jobs that hold something, those that are starting included.
        nodes: all nodes that are known, those that are dead or draining included.
        policy: quotas and limits.
        now: seconds on the clock of all other times here.
    """
    waiting, held, machines = list(queue), list(running), sorted(nodes, key=lambda node: node.node_id)
    call = _Call(held, machines, policy, now)
    for turn in in_order(call.lines(waiting, held), now):
        call.decide(turn)
    return call.decision()


class _Call:
    """One decision while it is made."""

    def __init__(self, running: Sequence[RunningJob], nodes: Sequence[Node], policy: Policy, now: float) -> None:
        self._nodes, self._policy, self._now = nodes, policy, now
        self._sizes = sizes_of(nodes)
        self._rooms = _rooms(nodes, running)
        self._starts_left = policy.starts_at_once - sum(job.starting for job in running)
        self._starts: list[Start] = []
        self._waiting: dict[str, str] = {}
        self._turns: list[Turn] = []  # of those that wait
        self._impossible: dict[str, str] = {}
        self._refusals: dict[Amounts, str | None] = {}  # by needs: why no node could ever hold it
        self._reached: dict[Amounts, bool] = {}
        self._best: dict[Amounts, tuple[int, NodeRoom | None]] = {}  # by needs: best fit, and after how many starts
        self._short: list[tuple[str, Amounts]] = []  # jobs that wait for room
        self._first: Turn | None = None  # of these the one that nothing may delay
        self._kept: Reservation | None = None  # the node for it
        self._kept_back: dict[Amounts, float] = {}  # needs that would delay it, with the soonest end of those seen
        self._overtaken: set[tuple[str, str, Amounts]] = set()  # tenant, priority and needs of what is kept back
        self._held = False  # a job waits for which there would be room

    def lines(self, queue: Iterable[WaitingJob], running: Iterable[RunningJob]) -> list[Line]:
        """The tenants' lines, with what each tenant holds."""
        total = Amounts(*map(sum, zip((0, 0, 0), *(node.capacity for node in self._nodes if node.alive), strict=True)))
        waiting: dict[str, list[WaitingJob]] = {}
        held: dict[str, list[RunningJob]] = {}
        for job in queue:
            waiting.setdefault(job.tenant, []).append(job)
        for holder in running:
            held.setdefault(holder.tenant, []).append(holder)
        lines = []
        for tenant, jobs in waiting.items():
            account = Account(tenant, self._policy.quotas.get(tenant, Quota()), total)
            for holder in held.get(tenant, ()):
                account.hold(counted(holder.needs), holder.expected_end)
            lines.append(Line(account, jobs, held.get(tenant, ()), self._policy.aging_seconds))
        return lines

    def decide(self, turn: Turn) -> None:
        """Start the job whose turn it is, or note why it waits."""
        job, account, needs = turn.job, turn.line.account, counted(turn.job.needs)
        if refusal := account.refusal(needs) or self._too_large(needs):
            self._impossible[job.job_id] = refusal
            return
        reason = self._obstacle(turn, needs)
        if reason is None and (found := self._find(turn, needs)):
            self._start(turn, needs, *found)
            return
        self._waiting[job.job_id] = self._behind(turn, needs) if reason is None else reason
        self._turns.append(turn)
        if account.claim is None and self._reachable(needs) and account.will_allow(needs):
            account.claim = Claim(name_of(job), (*needs, 1))

    def decision(self) -> Decision:
        """What was decided."""
        shortage, told = Shortage(self._rooms, self._nodes), dict[Amounts, str]()
        for job_id, needs in self._short:
            if needs not in told:
                told[needs] = shortage.told(needs)
            self._waiting[job_id] = told[needs]
        if self._kept:
            self._waiting[self._kept.job_id] += f"; node {self._kept.node.node_id} is kept for it"
        return Decision(
            starts=tuple(self._starts),
            waiting=self._waiting,
            impossible=self._impossible,
            again_at=self._again_at(),
        )

    def _obstacle(self, turn: Turn, needs: Amounts) -> str | None:
        """What is in the way of a job, apart from the one that must not be delayed. A shortage is told at the end."""
        account = turn.line.account
        if self._policy.draining:
            return "the cluster is draining, so nothing starts"
        if obstacle := account.obstacle(needs):
            return obstacle
        if claim := account.disturbs(needs):
            self._held = True
            return f"behind {claim.name}: the quota of tenant {account.tenant} is kept for it"
        if self._best_fit(needs) is None:
            self._short.append((turn.job_id, needs))
            self._keep_node(turn, needs)
            return ""
        if self._starts_left <= 0:
            limit = self._policy.starts_at_once
            return f"{limit} start{'s are' if limit != 1 else ' is'} going on"
        return None

    def _too_large(self, needs: Amounts) -> str | None:
        if needs not in self._refusals:
            self._refusals[needs] = too_large(needs, self._sizes)
        return self._refusals[needs]

    def _reachable(self, needs: Amounts) -> bool:
        """Whether it will fit on a node on which jobs may start, when all that end have ended."""
        if needs not in self._reached:
            self._reached[needs] = any(room.will_fit(needs) for room in self._rooms)
        return self._reached[needs]

    def _best_fit(self, needs: Amounts) -> NodeRoom | None:
        """As things are now. What once did not fit never will in this call, as free amounts only shrink."""
        known, starts = self._best.get(needs), len(self._starts)
        if known is None or (known[1] is not None and known[0] != starts):
            known = self._best[needs] = starts, best_fit(self._rooms, needs)
        return known[1]

    def _keep_node(self, turn: Turn, needs: Amounts) -> None:
        """For the first job that fits nowhere; an overdue one trusts no estimates."""
        if self._first is None and self._reachable(needs):
            self._kept = reserve(self._rooms, turn.job_id, needs, self._now, turn.below_overdue > 0)
            self._first = turn if self._kept else None

    def _find(self, turn: Turn, needs: Amounts) -> tuple[NodeRoom, tuple[GpuShare, ...]] | None:
        """Where a job that would fit may start; None: nowhere without delaying the first."""
        room, kept = self._best_fit(needs), self._kept
        if kept:
            if not self._policy.backfill or self._is_kept_back(turn, needs):
                return None
            if room is kept.node:
                if (devices := kept.borrow(needs, self._ends(turn.job))) is not None:
                    return room, devices
                room = best_fit((other for other in self._rooms if other is not kept.node), needs)
        devices = devices_for(needs.gpus, room.devices, room.devices) if room else None
        return (room, devices) if room and devices is not None else None

    def _is_kept_back(self, turn: Turn, needs: Amounts) -> bool:
        """Whether an equal job was, that ends as soon, or that is of the same tenant and priority and so before it."""
        soonest = self._kept_back.get(needs)
        if soonest is None:
            return False
        return soonest <= self._latest_end(turn.job) or (turn.job.tenant, turn.job.priority, needs) in self._overtaken

    def _behind(self, turn: Turn, needs: Amounts) -> str:
        """Remember that a job is kept back, and tell why."""
        if self._first is None or self._kept is None:
            raise AssertionError(f"job {turn.job_id} fits and nothing is in its way, but it does not start")
        self._held = True
        self._kept_back[needs] = min(self._kept_back.get(needs, math.inf), self._latest_end(turn.job))
        self._overtaken.add((turn.job.tenant, turn.job.priority, needs))
        return behind(turn, self._first, self._kept.node.node_id if self._policy.backfill else None)

    def _ends(self, job: WaitingJob) -> float | None:
        """When it ends if it starts now; None: nobody knows; infinite: it does not."""
        return None if job.expected_seconds is None else self._now + job.expected_seconds

    def _latest_end(self, job: WaitingJob) -> float:
        return math.inf if job.expected_seconds is None else self._now + job.expected_seconds

    def _start(self, turn: Turn, needs: Amounts, room: NodeRoom, devices: tuple[GpuShare, ...]) -> None:
        """Let it have this."""
        job, ends = turn.job, self._ends(turn.job)
        if self._kept and self._kept.node is room:
            self._kept.lend(needs, devices, ends)
        room.hold(Holding(self._now, job.job_id, ends, needs, devices))
        turn.line.account.hold(needs, ends)
        turn.line.start(job)
        self._starts.append(Start(job_id=job.job_id, node_id=room.node_id, devices=devices))
        self._starts_left -= 1

    def _again_at(self) -> float | None:
        """When a job that is kept back could start because somebody has waited, or because a job ran on too long."""
        if not self._held or self._starts_left <= 0:
            return None
        times = [turn.line.next_rise(turn.job, self._now) for turn in self._turns]
        times += [held.ends for room in self._rooms for held in room.holdings]
        return min((time for time in times if time is not None and self._now < time < math.inf), default=None)


def _rooms(nodes: Iterable[Node], running: Iterable[RunningJob]) -> list[NodeRoom]:
    """The nodes on which jobs may start, with who is there."""
    rooms = {node.node_id: NodeRoom(node) for node in nodes if node.is_open}
    for job in running:
        if job.node_id in rooms:
            needs = counted(job.needs)
            rooms[job.node_id].hold(Holding(job.since, job.job_id, job.expected_end, needs, job.devices))
    return list(rooms.values())
