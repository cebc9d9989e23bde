"""Places all jobs, with and without shared bases, and the base servers themselves: a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from palestra.types.states import BaseState
from palestra_control.jobs import BaseKind, Resources
from palestra_service.placement.bases import (
    BaseLimits,
    RunningBase,
    WaitingForBase,
    leaves_room,
    too_many_adapters,
    why_one_more,
)
from palestra_service.placement.fitting import Node, RunningJob, added, counted
from palestra_service.placement.placement import JobStart, PlacementPolicy, Planner
from palestra_service.placement.queues import QueueEntry, WaitingJob
from palestra_service.placement.reasons import sizes_of, too_large, with_part, within
from palestra_service.placement.tenants import SERVICE, TenantUsage, format_needs


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDecision:
    """The result of `place_all`. Every waiting job starts, or has a reason in `waiting` or in `impossible`.

    Attributes:
        bases: base server by job, of those that start on one.
        new_bases: where a base server starts now, by its kind.
        ended: reason by base server that ends now; none has jobs.
        impossible: reason by job that can never start, even on an empty cluster.
        again_at: when the same call could decide differently without other changes, Unix seconds; None: never.
    """

    starts: tuple[JobStart, ...]
    bases: Mapping[str, str]
    new_bases: Mapping[BaseKind, JobStart]
    ended: Mapping[str, str]
    waiting: Mapping[str, str]
    impossible: Mapping[str, str]
    again_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What there is: machines, and what runs on them.

    Attributes:
        bases: all base servers that have not ended.
    """

    nodes: Sequence[Node]
    running: Sequence[RunningJob] = ()
    bases: Sequence[RunningBase] = ()


def place_all(
    queue: Iterable[WaitingJob],
    shared: Iterable[WaitingForBase],
    cluster: Cluster,
    policy: PlacementPolicy,
    limits: BaseLimits,
    now: float,
) -> SharedDecision:
    """Decide which jobs start now, which base servers start for them, and which end.

    A base server without jobs ends when it has been idle for long enough, or as soon as another job could start with
    its room; while a job waits for it, only one whose turn is before that job's gets its room.

    Args:
        queue: jobs that wait and have a model of their own.
        shared: jobs that wait and ask for a shared base.
    """
    asking = {one.job.job_id: one for one in shared}
    jobs = [*queue, *(one.job for one in asking.values())]

    def plan(without: Collection[str] = ()) -> _SharedPlanner:
        """Decide as if some base servers were not there."""
        bases = tuple(base for base in cluster.bases if base.base_id not in without)
        planner = _SharedPlanner(replace(cluster, bases=bases), asking, policy, limits, now)
        planner.run(jobs)
        return planner

    found = plan()
    decision = found.shared_decision()
    idle = {base.base_id: base for base in cluster.bases if base.idle_since is not None}
    ends = {
        name: (base.idle_since or 0.0) + limits.idle_seconds for name, base in idle.items() if name not in found.kept
    }
    over = [name for name, end in ends.items() if end <= now and name not in decision.bases.values()]
    rest = [base for name, base in idle.items() if name not in over and name not in decision.bases.values()]
    early = _ended_for_room(found, list(decision.waiting), rest, plan)
    ended = dict.fromkeys(over, f"it had no job for {limits.idle_seconds:g} s")
    ended |= dict.fromkeys(early, "it has no job, and another one waits for its room")
    times = [decision.again_at, *(end for end in ends.values() if now < end < math.inf)]
    again_at = min((time for time in times if time is not None), default=None)
    return replace(decision, ended=ended, again_at=again_at)


class _SharedPlanner(Planner):
    """A decision that also chooses the base servers of jobs that ask for shared ones, at their turns.

    A job goes to the fullest serving base server of its kind with capacity, so that others become idle. If none has
    capacity and none is starting, one more is placed at the turn of the job, where there is room for that job beside
    it, if one node can hold both. The quotas of jobs' tenants count base servers by parts.

    A job never goes to a base server that leaves it no space on any node, even an empty one: it could wait forever
    behind the base server's other jobs. For jobs that their tenants' quotas would stop if all others started, no base
    server is started or kept. Otherwise a tenant's queue could fill the cluster.

    Attributes:
        chosen: base server by job, also of those that wait for room.
        kept: base servers that such a job keeps.
    """

    def __init__(
        self,
        cluster: Cluster,
        asking: Mapping[str, WaitingForBase],
        policy: PlacementPolicy,
        limits: BaseLimits,
        now: float,
    ) -> None:
        super().__init__([*cluster.running, *(base.held for base in cluster.bases)], cluster.nodes, policy, now)
        self._bases, self._asking, self._limits = sorted(cluster.bases, key=lambda base: base.base_id), asking, limits
        self._adapters = {base.base_id: base.adapters for base in self._bases}
        self._usage: dict[str, TenantUsage] = {}  # of tenants, if all of their jobs on shared bases started
        self._service = self.line(SERVICE, ())
        self._wanted: dict[BaseKind, list[str]] = {}  # jobs that need one more base server
        self.chosen: dict[str, str] = {}
        self.kept: set[str] = set()

    def decide(self, turn: QueueEntry) -> None:
        """Start the job whose turn it is on a base server, or record why it waits."""
        asking = self._asking.get(turn.job_id)
        if asking is None:
            super().decide(turn)
            return
        stopped, limit = self._stopped(turn), self._limits.adapters
        of_kind = [base for base in self._bases if base.kind == asking.kind and base.state is not BaseState.ENDING]
        fitting = [
            base
            for base in of_kind
            if leaves_room(base, turn.job, self._nodes) and self._adapters[base.base_id] + asking.adapters <= limit
        ]
        serving = [base for base in fitting if base.state is BaseState.SERVING and base.waiting <= self._limits.waiting]
        starting = [base for base in fitting if base.state is BaseState.LOADING]
        if serving:
            base = min(serving, key=lambda base: (-self._adapters[base.base_id], base.base_id))
            self._place_on(turn, base.base_id, asking.adapters, is_stopped=stopped is not None)
        elif stopped is not None:
            self._waiting[turn.job_id] = stopped
        elif starting:
            self._waiting[turn.job_id] = f"waits for the base server of {asking.kind.model}, which is starting"
            self._adapters[starting[0].base_id] += asking.adapters
        elif asking.adapters > limit:
            self._waiting[turn.job_id] = too_many_adapters(asking.adapters, self._limits)
        elif (never := no_room(turn.job.needs, self._limits, self._nodes)) is not None:
            self._impossible[turn.job_id] = never
        else:
            self._want(turn, asking.kind)

    def _stopped(self, turn: QueueEntry) -> str | None:
        """Return why the quota of a job's tenant would stop it if all others started; None: it would not."""
        usage, counts = self._usage.setdefault(turn.job.tenant, copy(turn.line.account)), turn.job.counts
        reason = usage.refusal(counts) or usage.obstacle(counts)
        if reason is None:
            usage.hold(counts, None)
            return None
        return with_part(reason, turn.job.beside)

    def _place_on(self, turn: QueueEntry, base_id: str, adapters: int, *, is_stopped: bool) -> None:
        self.chosen[turn.job_id] = base_id
        before = len(self._starts)
        super().decide(turn)
        if len(self._starts) > before or not is_stopped:  # else another job may have the capacity
            self._adapters[base_id] += adapters
        if not is_stopped:
            self.kept.add(base_id)

    def _want(self, turn: QueueEntry, kind: BaseKind) -> None:
        jobs = self._wanted.setdefault(kind, [])
        if not jobs:
            starter = _starter(kind, turn.job, self._limits, self._nodes)
            super().decide(turn._replace(job=starter, job_id=starter.job_id, line=self._service))
        jobs.append(turn.job_id)
        self._waiting[turn.job_id] = ""  # keeps the order of turns

    @property
    def started(self) -> set[str]:
        """Return the jobs that start, and those for which a base server starts."""
        starters = {_starter_id(kind): jobs[0] for kind, jobs in self._wanted.items()}
        return {starters.get(start.job_id, start.job_id) for start in self._starts}

    def shared_decision(self) -> SharedDecision:
        """Return the decision, without base servers that end."""
        decision = self.decision()
        starters = {_starter_id(kind): kind for kind in self._wanted}
        waiting = dict(decision.waiting)
        for name, kind in starters.items():
            first = self._asking[self._wanted[kind][0]].job
            why = why_one_more(kind, self._bases, self._limits, first, self._nodes)
            text = f"{why}; one more {waiting.pop(name, 'is started')}"
            waiting |= dict.fromkeys(self._wanted[kind], text)
        return SharedDecision(
            starts=tuple(start for start in decision.starts if start.job_id not in starters),
            bases={start.job_id: self.chosen[start.job_id] for start in decision.starts if start.job_id in self.chosen},
            new_bases={starters[start.job_id]: start for start in decision.starts if start.job_id in starters},
            ended={},
            waiting=waiting,
            impossible=decision.impossible,
            again_at=decision.again_at,
        )


def _ended_for_room(
    found: _SharedPlanner,
    waiting: Sequence[str],
    idle: Sequence[RunningBase],
    plan: Callable[[Collection[str]], _SharedPlanner],
) -> list[str]:
    """Return idle base servers whose end lets one more job start. `waiting`: jobs in the order of their turns.

    Those without waiting jobs end first, longest idle first.
    """
    if not idle or not waiting:
        return []
    turns = {job_id: turn for turn, job_id in enumerate(waiting)}
    awaited: dict[str, int] = {}  # by base server, the first turn of the jobs that wait for it
    for job_id in waiting:
        if job_id in found.chosen:
            awaited.setdefault(found.chosen[job_id], turns[job_id])

    def helps(ended: Sequence[str]) -> bool:
        # Otherwise two base servers could take each other's room for ever, and no job of either would start.
        before = min((awaited[name] for name in ended if name in awaited), default=math.inf)
        return any(turns.get(job_id, len(turns)) < before for job_id in plan(ended).started - found.started)

    ended: list[str] = []
    for base in sorted(idle, key=lambda one: (-awaited.get(one.base_id, math.inf), one.idle_since or 0.0, one.base_id)):
        ended.append(base.base_id)
        if helps(ended):
            break
    else:
        return []
    for base_id in list(ended):  # some are on other nodes, or too small to make a difference
        fewer = [name for name in ended if name != base_id]
        ended = fewer if helps(fewer) else ended
    return ended


def _starter_id(kind: BaseKind) -> str:
    """Return a new base server's id among jobs, which no job has."""
    return f"base of {kind.model}{', deterministic' if kind.deterministic else ''}"


def no_room(needs: Resources, limits: BaseLimits, nodes: Sequence[Node]) -> str | None:
    """Return why a job that needs a new base server can never start; None: it can.

    Dead and draining nodes count, because they may come back. Without any node no job is refused.
    """
    job, base, sizes = counted(needs), counted(limits.resources), sizes_of(nodes)
    if (refusal := too_large(job, sizes)) is not None:
        return refusal
    if (refusal := too_large(base, sizes)) is not None:
        return f"needs a base server, which {refusal}"
    able = {node.node_id for node in nodes if within(base, node.capacity)}
    others = {node.node_id for node in nodes if within(job, node.capacity)}
    if not nodes or len(able | others) > 1 or _hold_both(needs, limits, nodes):
        return None
    return (
        f"needs {format_needs(job)} beside its base server, which holds {format_needs(base)}; no node has room for "
        "both, and no other node for one of them"
    )


def _hold_both(needs: Resources, limits: BaseLimits, nodes: Iterable[Node]) -> bool:
    both = added(counted(needs), counted(limits.resources))
    return any(within(both, node.capacity) for node in nodes)


def _starter(kind: BaseKind, first: WaitingJob, limits: BaseLimits, nodes: Sequence[Node]) -> WaitingJob:
    """Return a new base server as a job for `place`, with the turn of the first job that needs it.

    Its needs include that job's, which starts when the base server listens.
    """
    base, job = limits.resources, first.needs
    with_job = Resources(cpus=base.cpus + job.cpus, gpus=base.gpus, memory_gib=base.memory_gib + job.memory_gib)
    return WaitingJob(
        job_id=_starter_id(kind),
        tenant=SERVICE,
        priority=first.priority,
        submitted_at=first.submitted_at,
        needs=with_job if _hold_both(first.needs, limits, nodes) else base,
    )
