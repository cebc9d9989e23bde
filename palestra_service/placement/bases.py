"""Decide on which base server a job runs that asks for a shared one: a pure function, as `placement.place` is.

A job goes to a serving base server of its kind that has room, the fullest one, so that others become idle. Where none
has room and none is starting, one more is asked for (`sharing` places it). A base server without jobs ends when it has
been idle for long enough.

A job never goes to a base server that leaves it no room on any node, however empty that is: it would wait for ever
where the base server has other jobs.

With J waiting jobs, B base servers and N nodes a call takes O(J B N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.types.bases import BaseKind
from palestra.types.jobs import Resources
from palestra.types.states import BaseState
from palestra_service.placement.fitting import Amounts, Node, RunningJob, added, counted
from palestra_service.placement.queues import WaitingJob
from palestra_service.placement.reasons import within


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLimits:
    """The operator's settings of base servers.

    Attributes:
        resources: that each holds.
        dtype: precision of its engine's and its trainer's products.
        slots: adapters in memory with their moments, others wait on disk; None: all.
        adapters: of all jobs on one base server, at most.
        waiting: a base server with more requests in its queue gets no further job.
        idle_seconds: how long one without jobs is kept.
    """

    resources: Resources = field(default_factory=Resources)
    dtype: str = "bfloat16"
    slots: int | None = None
    adapters: int = 16
    waiting: int = 32
    idle_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingForBase:
    """A queued job that asks for a shared base.

    Attributes:
        job: as placement sees it.
        kind: of the base server that it needs.
        adapters: how many it trains or samples from; at least 1.
    """

    job: WaitingJob
    kind: BaseKind
    adapters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningBase:
    """A base server, as placement sees it.

    Attributes:
        base_id: of the base server.
        kind: its model, and whether it is deterministic.
        state: of its lifecycle.
        jobs: that run on it.
        adapters: of these jobs.
        waiting: requests in its queue when it said so last.
        idle_since: Unix seconds since it has had no job; None: it has some, or does not serve.
        held: its room on a node.
    """

    base_id: str
    kind: BaseKind
    state: BaseState
    jobs: int
    adapters: int
    waiting: int
    idle_since: float | None
    held: RunningJob


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseDecision:
    """The result of `choose_bases`. Every waiting job is in exactly one of the first three attributes.

    Attributes:
        chosen: base server by job, for jobs that may start as soon as there is room for themselves.
        waiting: reason by job.
        wanted: by kind the jobs for which one more base server is to be started, in their order.
        why: by kind, why those that there are do not suffice.
        idle: base servers that have been idle for long enough.
        again_at: when one more will have been, Unix seconds; None: never.
    """

    chosen: Mapping[str, str]
    waiting: Mapping[str, str]
    wanted: Mapping[BaseKind, tuple[WaitingForBase, ...]]
    why: Mapping[BaseKind, str]
    idle: tuple[str, ...]
    again_at: float | None


def part_of_base(limits: BaseLimits, adapters: int) -> Amounts:
    """Return what of a base server is counted for the tenant of a job: as much as its adapters take of all places.

    So it does not depend on the other jobs there, and is known when the job is submitted. Places that no job has are
    counted for no tenant.
    """
    return Amounts(*(amount * adapters // limits.adapters for amount in counted(limits.resources)))


def choose_bases(
    queue: Iterable[WaitingForBase],
    bases: Iterable[RunningBase],
    nodes: Sequence[Node],
    limits: BaseLimits,
    now: float,
    stopped: Mapping[str, str],
) -> BaseDecision:
    """Choose a base server for each job of a queue. The order in which base servers are given does not matter.

    Args:
        queue: jobs that wait and ask for a shared base, in the order of their turns.
        nodes: all known nodes; without any it is not known what a base server leaves.
        now: Unix seconds.
        stopped: reasons by job, of those that their tenants' quotas stop: they get the room that the others leave, and
            no base server is started or kept for them. Else a tenant could fill the cluster with its queue.
    """
    known = sorted(bases, key=lambda base: base.base_id)
    adapters = {base.base_id: base.adapters for base in known}
    chosen: dict[str, str] = {}
    waiting: dict[str, str] = {}
    wanted: dict[BaseKind, list[WaitingForBase]] = {}
    for asking in sorted(queue, key=lambda asking: asking.job.job_id in stopped):
        own = [base for base in known if base.kind == asking.kind and base.state is not BaseState.ENDING]
        beside = [base for base in own if _leaves_room(base, asking.job, nodes)]
        fitting = [base for base in beside if adapters[base.base_id] + asking.adapters <= limits.adapters]
        serving = [base for base in fitting if base.state is BaseState.SERVING and base.waiting <= limits.waiting]
        starting = [base for base in fitting if base.state is BaseState.LOADING]
        if serving:
            base = min(serving, key=lambda base: (-adapters[base.base_id], base.base_id))
            chosen[asking.job.job_id] = base.base_id
            adapters[base.base_id] += asking.adapters
        elif asking.job.job_id in stopped:
            waiting[asking.job.job_id] = stopped[asking.job.job_id]
        elif starting:
            waiting[asking.job.job_id] = f"waits for the base server of {asking.kind.model}, which is starting"
            adapters[starting[0].base_id] += asking.adapters
        elif asking.adapters > limits.adapters:
            waiting[asking.job.job_id] = too_many_adapters(asking.adapters, limits)
        else:
            wanted.setdefault(asking.kind, []).append(asking)
    taken = {base_id for job_id, base_id in chosen.items() if job_id not in stopped}
    idle = {base.base_id: base.idle_since for base in known if base.idle_since is not None}
    ends = {name: since + limits.idle_seconds for name, since in idle.items() if name not in taken}
    return BaseDecision(
        chosen=chosen,
        waiting=waiting,
        wanted={kind: tuple(asking) for kind, asking in wanted.items()},
        why={kind: _why_one_more(kind, known, limits, asking[0].job, nodes) for kind, asking in wanted.items()},
        idle=tuple(name for name, end in ends.items() if end <= now),
        again_at=min((end for end in ends.values() if now < end < math.inf), default=None),
    )


def too_many_adapters(adapters: int, limits: BaseLimits) -> str:
    """Return why a job can run on no base server, however empty."""
    return f"has {adapters} adapters, and a base server of this service takes {limits.adapters}"


def _leaves_room(base: RunningBase, job: WaitingJob, nodes: Sequence[Node]) -> bool:
    """Return whether some node could hold a job beside a base server, if nothing else were there."""
    needs, held = counted(job.needs), counted(base.held.needs)
    taken = (added(needs, held) if node.node_id == base.held.node_id else needs for node in nodes)
    return not nodes or any(within(amounts, node.capacity) for amounts, node in zip(taken, nodes, strict=True))


def _why_one_more(
    kind: BaseKind, bases: Iterable[RunningBase], limits: BaseLimits, first: WaitingJob, nodes: Sequence[Node]
) -> str:
    """Return in words why the first job that needs a base server needs one that is not there yet."""
    own = [base for base in bases if base.kind == kind and base.state is BaseState.SERVING]
    if not own:
        return f"no base server has {kind.model}" + (" with deterministic = true" if kind.deterministic else "")
    if not any(_leaves_room(base, first, nodes) for base in own):
        return f"no node has room for the job beside the base server of {kind.model} that is there"
    if all(base.waiting > limits.waiting for base in own):
        return f"over {limits.waiting} requests wait at each base server of {kind.model}"
    return f"no base server of {kind.model} has room for its adapters ({limits.adapters} on each)"
