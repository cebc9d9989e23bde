"""Chooses the base server of a job that asks for a shared one: a pure function, like `placement.place`.

A job goes to the fullest serving base server of its kind with capacity, so that others become idle. If none has
capacity and none is starting, one more is requested (`sharing` places it). A base server without jobs ends after a time
of being idle.

A job never goes to a base server that leaves it no space on any node, even an empty one: it could wait forever behind
the base server's other jobs.

With J waiting jobs, B base servers and N nodes a call takes O(J B N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.types.states import BaseState
from palestra_control.jobs import BaseKind, Resources
from palestra_service.placement.fitting import Amounts, Node, RunningJob, added, counted
from palestra_service.placement.queues import WaitingJob
from palestra_service.placement.reasons import within


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLimits:
    """The operator's settings of base servers.

    Attributes:
        dtype: precision of engine and trainer.
        slots: adapters in memory with their moments, others are on disk; None: all.
        adapters: limit of all jobs on one base server.
        waiting: with more requests in its queue, a base server gets no further job.
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
        adapters: number it trains or samples from; at least 1.
    """

    job: WaitingJob
    kind: BaseKind
    adapters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningBase:
    """A base server, as placement sees it.

    Attributes:
        waiting: requests in its queue at the last report.
        idle_since: Unix seconds without jobs; None: it has jobs, or does not serve.
        held: its resources on a node.
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
        chosen: base server by job, for jobs that may start when their own resources are free.
        wanted: by kind, the jobs that need one more base server, in order.
        idle: base servers that have been idle for long enough.
        again_at: when one more will be, Unix seconds; None: never.
    """

    chosen: Mapping[str, str]
    waiting: Mapping[str, str]
    wanted: Mapping[BaseKind, tuple[WaitingForBase, ...]]
    why: Mapping[BaseKind, str]
    idle: tuple[str, ...]
    again_at: float | None


def part_of_base(limits: BaseLimits, adapters: int) -> Amounts:
    """Return the part of a base server counted for a job's tenant: its adapters' fraction of the capacity.

    It is independent of other jobs, and known at submission. Unused capacity is counted for no tenant.
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
    """Choose a base server for each job of a queue, independent of the order of base servers.

    Args:
        queue: jobs that ask for a shared base, in the order of their turns.
        nodes: all known nodes; without any, it is unknown what a base server leaves.
        stopped: reasons of jobs stopped by quotas: they get remaining capacity, but no base server is started or kept
            for them. Otherwise a tenant's queue could fill the cluster.
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
    """Return why a job can run on no base server, even an empty one."""
    return f"has {adapters} adapters, and a base server of this service takes {limits.adapters}"


def _leaves_room(base: RunningBase, job: WaitingJob, nodes: Sequence[Node]) -> bool:
    """Return whether an otherwise empty node could hold a base server and a job."""
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
