"""Places all jobs, with and without shared bases, and the base servers themselves: a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from palestra_control.jobs import BaseKind, Resources
from palestra_service.placement.bases import BaseDecision, BaseLimits, RunningBase, WaitingForBase, choose_bases
from palestra_service.placement.fitting import Node, RunningJob, added, counted
from palestra_service.placement.placement import JobStart, Placement, PlacementPolicy, in_turn, over_quota, place
from palestra_service.placement.queues import WaitingJob
from palestra_service.placement.reasons import sizes_of, too_large, within
from palestra_service.placement.tenants import SERVICE, format_needs


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

    A base server that is to start has its turn where the first job that needs it has, and is placed where there is room
    for that job beside it, if one node can hold both. The quotas of its jobs' tenants count it by parts. One without
    jobs ends when it has been idle for long enough, or as soon as another job could start with its room; while
    a job waits for it, only one whose turn is before that job's gets its room.

    Args:
        queue: jobs that wait and have a model of their own.
        shared: jobs that wait and ask for a shared base.
    """
    own, jobs, known, machines = list(queue), cluster.running, cluster.bases, cluster.nodes
    by_id = {one.job.job_id: one for one in shared}
    everything = [*own, *(one.job for one in by_id.values())]
    stopped = over_quota((one.job for one in by_id.values()), jobs, policy, now)
    order = in_turn(everything, [*jobs, *(base.held for base in known)], machines, policy, now)
    asking = [by_id[job_id] for job_id in order if job_id in by_id]

    def able_of(choice: BaseDecision) -> dict[BaseKind, list[WaitingForBase]]:
        """Return the jobs that need one more base server, without those that could never start."""
        found = {kind: [one for one in ones if one.job.job_id not in never] for kind, ones in choice.wanted.items()}
        return {kind: able for kind, able in found.items() if able}

    never = {job_id: reason for job_id, one in by_id.items() if (reason := no_room(one.job.needs, limits, machines))}

    def decide(without: Collection[str]) -> tuple[BaseDecision, Placement]:
        """Decide as if some base servers were not there."""
        present = [base for base in known if base.base_id not in without]
        choice = choose_bases(asking, present, machines, limits, now, stopped)
        waiting = [*own, *(one.job for one in asking if one.job.job_id in choice.chosen)]
        waiting += [_starter(kind, able[0].job, limits, machines) for kind, able in able_of(choice).items()]
        return choice, place(waiting, [*jobs, *(base.held for base in present)], machines, policy, now)

    choice, decision = decide(())
    starters = {_starter_id(kind): kind for kind in able_of(choice)}
    going = {choice.chosen.get(start.job_id) for start in decision.starts}
    over = [base_id for base_id in choice.idle if base_id not in going]
    idle = [base for base in known if base.idle_since is not None and base.base_id not in going.union(over)]
    early = _ended_for_room(choice.chosen, decision, idle, lambda ended: decide(ended)[1])
    ended = dict.fromkeys(over, f"it had no job for {limits.idle_seconds:g} s")
    ended |= dict.fromkeys(early, "it has no job, and another one waits for its room")
    return _assembled(decision, choice, starters, ended, never)


def _assembled(
    decision: Placement,
    choice: BaseDecision,
    starters: Mapping[str, BaseKind],
    ended: Mapping[str, str],
    never: Mapping[str, str],
) -> SharedDecision:
    """Join both decisions, with new base servers separated from jobs."""
    reasons: dict[str, str] = {}
    for name, kind in starters.items():
        text = f"{choice.why[kind]}; one more " + decision.waiting.get(name, "is started")
        reasons |= dict.fromkeys((one.job.job_id for one in choice.wanted[kind]), text)
    wanting = [one.job.job_id for ones in choice.wanted.values() for one in ones]
    impossible = {job_id: never[job_id] for job_id in wanting if job_id in never}
    times = [time for time in (decision.again_at, choice.again_at) if time is not None]
    return SharedDecision(
        starts=tuple(start for start in decision.starts if start.job_id not in starters),
        bases={start.job_id: choice.chosen[start.job_id] for start in decision.starts if start.job_id in choice.chosen},
        new_bases={starters[start.job_id]: start for start in decision.starts if start.job_id in starters},
        ended=ended,
        waiting={**_without(decision.waiting, starters), **choice.waiting, **_without(reasons, impossible)},
        impossible={**decision.impossible, **impossible},
        again_at=min(times, default=None),
    )


def _ended_for_room(
    chosen: Mapping[str, str],
    decision: Placement,
    idle: Sequence[RunningBase],
    without: Callable[[Collection[str]], Placement],
) -> list[str]:
    """Return idle base servers whose end lets one more job start.

    Those without waiting jobs end first, longest idle first.
    """
    if not idle or not decision.waiting:
        return []
    starts = {start.job_id for start in decision.starts}
    turns = {job_id: turn for turn, job_id in enumerate(decision.waiting)}
    awaited: dict[str, int] = {}  # by base server, the first turn of the jobs that wait for it
    for job_id in decision.waiting:
        if job_id in chosen:
            awaited.setdefault(chosen[job_id], turns[job_id])

    def helps(ended: Sequence[str]) -> bool:
        # Otherwise two base servers could take each other's room for ever, and no job of either would start.
        before = min((awaited[name] for name in ended if name in awaited), default=math.inf)
        more = {start.job_id for start in without(ended).starts} - starts
        return any(turns.get(job_id, len(turns)) < before for job_id in more)

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
    """Return whether a node can hold both a base server and a job."""
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


def _without(reasons: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return reasons without some jobs."""
    left_out = set(names)
    return {job_id: reason for job_id, reason in reasons.items() if job_id not in left_out}
