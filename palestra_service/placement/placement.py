"""Decides which job starts where: a pure function of the queue, the running jobs, the nodes, the policy and the time.

Jobs have their turns in the order of `turns`. A job that fits starts where the least is left over (`gangs`). For the
first job that fits nowhere a node is reserved, and later jobs start only where they do not delay it (backfill). A job
stopped by its tenant's quota reserves its part of the quota in the same manner. The processes of a job start
together, with reservations for all of them. No job starves:

- a waiting job ages until it is overdue, once the finite number of jobs that its tenant submitted before it are over;
- only a finite number of jobs has been overdue for longer, so it becomes the first;
- the node reserved for an overdue job is chosen without trusting estimates, and the choice settles (`gangs.reserve`).

Only resources of a dead node that may come back, or of an endless job that may be stopped, cannot be promised.

With W waiting jobs, D different needs among them, S starts and N nodes a call takes O(W log W + (S + D) N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra_service.placement.fitting import (
    NOTHING,
    Allocation,
    FreeOnNode,
    GpuShare,
    Node,
    PlacedBundle,
    Reservation,
    RunningJob,
    added,
)
from palestra_service.placement.gangs import Gang, GangPlaces, fit_gang, gang_of, reserve
from palestra_service.placement.queues import QueueEntry, TenantQueue, WaitingJob, in_order
from palestra_service.placement.reasons import (
    behind,
    gang_too_large,
    name_of,
    short,
    shortage,
    with_part,
)
from palestra_service.placement.tenants import Quota, QuotaReservation, TenantUsage


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPolicy:
    """The operator's settings of placement.

    Attributes:
        starts_at_once: limit of STARTING jobs.
        aging_seconds: waiting time that raises a job by one priority class.
    """

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    starts_at_once: int = 2
    draining: bool = False
    aging_seconds: float = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStart:
    """A job that starts now.

    Attributes:
        bundles: of its further processes, in the order of `Resources.parts`.
    """

    job_id: str
    node_id: str
    devices: tuple[GpuShare, ...]
    bundles: tuple[PlacedBundle, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The result of `place`. Every waiting job is in exactly one of the first three attributes.

    Attributes:
        impossible: reason by job that can never start, even on an empty cluster.
        again_at: when the same call could start a job without other changes, Unix seconds; None: never.
    """

    starts: tuple[JobStart, ...]
    waiting: Mapping[str, str]
    impossible: Mapping[str, str]
    again_at: float | None


def place(
    queue: Iterable[WaitingJob],
    running: Iterable[RunningJob],
    nodes: Iterable[Node],
    policy: PlacementPolicy,
    now: float,
) -> Placement:
    """Decide which jobs start now, independent of the order of jobs and nodes.

    Call it when a job is submitted or ends, when a start is finished, when a node or the policy changes, at `again_at`,
    and again after a decision that starts a job, because that changes the turns.

    Args:
        running: all jobs with resources, including starting ones.
        nodes: all known nodes, including dead and draining ones.
        now: seconds on the clock of all other times here.
    """
    planner = Planner(list(running), nodes, policy, now)
    planner.run(queue)
    return planner.decision()


class Planner:
    """One decision while it is made."""

    def __init__(
        self, running: Sequence[RunningJob], nodes: Iterable[Node], policy: PlacementPolicy, now: float
    ) -> None:
        """Begin without a decision about any waiting job."""
        self._nodes, self._policy, self._now = sorted(nodes, key=lambda node: node.node_id), policy, now
        self._rooms = _rooms(self._nodes, running)
        self._total = added(NOTHING, *(node.capacity for node in self._nodes if node.alive))
        self._running: dict[str, list[RunningJob]] = {}  # by tenant
        for job in running:
            self._running.setdefault(job.tenant, []).append(job)
        self._starts_left = policy.starts_at_once - sum(job.starting for job in running)
        self._starts: list[JobStart] = []
        self._waiting: dict[str, str] = {}
        self._turns: list[QueueEntry] = []  # of the jobs that wait
        self._impossible: dict[str, str] = {}
        # Answers that many jobs share, by their needs; the best fit with the number of starts when it was found.
        self._refusals: dict[Gang, str | None] = {}
        self._reached: dict[Gang, bool] = {}
        self._best: dict[Gang, tuple[int, GangPlaces | None]] = {}
        self._short: list[tuple[str, Gang]] = []  # jobs that wait for room
        self._first: QueueEntry | None = None  # the first of these, which no other job may delay
        self._kept: dict[FreeOnNode, Reservation] = {}  # for the first job; none, or one for each node that it gets
        # Jobs that would delay the first one: the soonest end by needs, and (tenant, priority, needs).
        self._kept_back: dict[Gang, float] = {}
        self._overtaken: set[tuple[str, str, Gang]] = set()
        self._held = False  # whether a job waits although there is room for it

    def run(self, queue: Iterable[WaitingJob]) -> None:
        """Decide about all jobs of a queue in the order of their turns."""
        waiting: dict[str, list[WaitingJob]] = {}
        for job in queue:
            waiting.setdefault(job.tenant, []).append(job)
        for turn in in_order([self.line(tenant, jobs) for tenant, jobs in waiting.items()], self._now):
            self.decide(turn)

    def line(self, tenant: str, jobs: Iterable[WaitingJob]) -> TenantQueue:
        """Return the queue of a tenant, with its usage."""
        held = self._running.get(tenant, ())
        account = TenantUsage(tenant, self._policy.quotas.get(tenant, Quota()), self._total)
        for holder in held:
            account.hold(holder.counts, holder.expected_end)
        return TenantQueue(account, jobs, held, self._policy.aging_seconds)

    def decide(self, turn: QueueEntry) -> None:
        """Start the job whose turn it is, or record why it waits."""
        job, account, needs, counts = turn.job, turn.line.account, gang_of(turn.job.needs), turn.job.counts
        if over := account.refusal(counts):
            self._impossible[job.job_id] = with_part(over, job.beside)
            return
        if refusal := self._too_large(needs):
            self._impossible[job.job_id] = refusal
            return
        reason = self._obstacle(turn, needs)
        if reason is None and (found := self._find(turn, needs)):
            self._start(turn, needs, found)
            return
        self._waiting[job.job_id] = self._behind(turn, needs) if reason is None else reason
        self._turns.append(turn)
        if account.claim is None and self._reachable(needs) and account.will_allow(counts):
            account.claim = QuotaReservation(name_of(job), (*counts, 1))

    def decision(self) -> Placement:
        """Return the decision, after putting shortages into words."""
        texts = {needs: shortage(needs, self._rooms, self._nodes) for needs in {needs for _, needs in self._short}}
        self._waiting |= {job_id: texts[needs] for job_id, needs in self._short}
        if self._first is not None:
            self._waiting[self._first.job_id] += f"; {self._kept_nodes()} kept for it"
        return Placement(
            starts=tuple(self._starts),
            waiting=self._waiting,
            impossible=self._impossible,
            again_at=self._again_at(),
        )

    def _kept_nodes(self) -> str:
        names = sorted(short(node.node_id) for node in self._kept)
        return f"node {names[0]} is" if len(names) == 1 else f"nodes {', '.join(names)} are"

    def _obstacle(self, turn: QueueEntry, needs: Gang) -> str | None:
        """Return what prevents a job from starting, apart from the reservation; None: it can start; "": a shortage.

        Shortages are described at the end, when the remaining resources are known.
        """
        account = turn.line.account
        if self._policy.draining:
            return "the cluster is draining, so nothing starts"
        if obstacle := account.obstacle(turn.job.counts):
            return with_part(obstacle, turn.job.beside)
        if claim := account.disturbs(turn.job.counts):
            self._held = True
            return f"behind {claim.name}: the quota of tenant {account.tenant} is kept for it"
        if self._best_fit(needs) is None:
            self._short.append((turn.job_id, needs))
            self._keep_nodes(turn, needs)
            return ""
        if self._starts_left <= 0:
            limit = self._policy.starts_at_once
            return f"{limit} start{'s are' if limit != 1 else ' is'} going on"
        return None

    def _too_large(self, needs: Gang) -> str | None:
        if needs not in self._refusals:
            self._refusals[needs] = gang_too_large(needs, self._nodes)
        return self._refusals[needs]

    def _reachable(self, needs: Gang) -> bool:
        """Return whether a job will fit on open nodes when all jobs that ever end have ended."""
        if needs not in self._reached:
            lasting = {room: room.lasting for room in self._rooms}
            self._reached[needs] = isinstance(fit_gang(needs, lasting), GangPlaces)
        return self._reached[needs]

    def _best_fit(self, needs: Gang) -> GangPlaces | None:
        """Return the best places for a job now; None: it fits nowhere.

        A job that did not fit once will not fit later in this call, because free amounts only shrink.
        """
        known, starts = self._best.get(needs), len(self._starts)
        if known is None or (known[1] is not None and known[0] != starts):
            known = self._best[needs] = starts, _fitted(self._rooms, needs)
        return known[1]

    def _keep_nodes(self, turn: QueueEntry, needs: Gang) -> None:
        """Keep nodes for the first job that fits nowhere. For an overdue job, estimated ends are not trusted."""
        if self._first is None and self._reachable(needs):
            kept = reserve(self._rooms, turn.job_id, needs, self._now, trusting=turn.below_overdue > 0)
            self._kept = {reservation.node: reservation for reservation in kept}
            self._first = turn if kept else None

    def _find(self, turn: QueueEntry, needs: Gang) -> GangPlaces | None:
        """Return where a fitting job may start; None: nowhere without delaying the first job."""
        if not self._kept:
            return self._best_fit(needs)
        if self._is_kept_back(turn, needs):
            return None
        found, ends = self._best_fit(needs), self._ends(turn.job)
        if found is None:
            return None
        if not any(room in self._kept for room, _ in found.places):
            return found
        if len(found.places) == 1:
            room, _ = found.places[0]
            if (devices := self._kept[room].borrow(needs.total, ends)) is not None:
                return GangPlaces(((room, devices),))
        elif all(self._kept[room].is_over(ends) for room, _ in found.places if room in self._kept):
            return found
        return _fitted([other for other in self._rooms if other not in self._kept], needs)

    def _is_kept_back(self, turn: QueueEntry, needs: Gang) -> bool:
        """Return whether an equal job was held back that ends as soon, or has the same tenant and priority.

        Then this job is held back too, without another search.
        """
        soonest = self._kept_back.get(needs)
        if soonest is None:
            return False
        return soonest <= self._latest_end(turn.job) or (turn.job.tenant, turn.job.priority, needs) in self._overtaken

    def _behind(self, turn: QueueEntry, needs: Gang) -> str:
        """Record that a job is held back for the first one, and return the reason."""
        if self._first is None:
            raise AssertionError(f"job {turn.job_id} fits and nothing is in its way, but it does not start")
        self._held = True
        self._kept_back[needs] = min(self._kept_back.get(needs, math.inf), self._latest_end(turn.job))
        self._overtaken.add((turn.job.tenant, turn.job.priority, needs))
        return behind(turn, self._first, self._kept_nodes())

    def _ends(self, job: WaitingJob) -> float | None:
        """Return when a job ends if it starts now; None: unknown; infinite: never."""
        return None if job.expected_seconds is None else self._now + job.expected_seconds

    def _latest_end(self, job: WaitingJob) -> float:
        """Return when a job ends at the latest if it starts now; infinite if that is unknown."""
        return math.inf if job.expected_seconds is None else self._now + job.expected_seconds

    def _start(self, turn: QueueEntry, needs: Gang, found: GangPlaces) -> None:
        job, ends = turn.job, self._ends(turn.job)
        for part, (room, devices) in zip(needs.parts, found.places, strict=True):
            if room in self._kept:
                self._kept[room].lend(part.needs, devices, ends)
            room.hold(Allocation(self._now, job.job_id, ends, part.needs, devices))
        turn.line.account.hold(job.counts, ends)
        turn.line.start(job)
        own, *others = (PlacedBundle(room.node_id, devices) for room, devices in found.places)
        self._starts.append(
            JobStart(job_id=job.job_id, node_id=own.node_id, devices=own.devices, bundles=tuple(others))
        )
        self._starts_left -= 1

    def _again_at(self) -> float | None:
        """Return when a held-back job could start, because a job has aged or has exceeded its expected end."""
        if not self._held or self._starts_left <= 0:
            return None
        times = [turn.line.next_rise(turn.job, self._now) for turn in self._turns]
        times += [held.ends for room in self._rooms for held in room.holdings]
        return min((time for time in times if time is not None and self._now < time < math.inf), default=None)


def _rooms(nodes: Iterable[Node], running: Iterable[RunningJob]) -> list[FreeOnNode]:
    rooms = {node.node_id: FreeOnNode(node) for node in nodes if node.is_open}
    for job in running:
        for needs, place in job.places:
            if place.node_id in rooms:
                held = Allocation(job.since, job.job_id, job.expected_end, needs, place.devices)
                rooms[place.node_id].hold(held)
    return list(rooms.values())


def _fitted(rooms: Iterable[FreeOnNode], needs: Gang) -> GangPlaces | None:
    found = fit_gang(needs, {room: room for room in rooms})
    return found if isinstance(found, GangPlaces) else None
