"""Base servers and jobs that ask for shared ones, as placement sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def part_of_base(limits: BaseLimits, adapters: int) -> Amounts:
    """Return the part of a base server counted for a job's tenant: its adapters' fraction of the capacity.

    It is independent of other jobs, and known at submission. Unused capacity is counted for no tenant.
    """
    return Amounts(*(amount * adapters // limits.adapters for amount in counted(limits.resources)))


def too_many_adapters(adapters: int, limits: BaseLimits) -> str:
    """Return why a job can run on no base server, even an empty one."""
    return f"has {adapters} adapters, and a base server of this service takes {limits.adapters}"


def leaves_room(base: RunningBase, job: WaitingJob, nodes: Sequence[Node]) -> bool:
    """Return whether an otherwise empty node could hold a base server and a job."""
    needs, held = counted(job.needs), counted(base.held.needs)
    taken = (added(needs, held) if node.node_id == base.held.node_id else needs for node in nodes)
    return not nodes or any(within(amounts, node.capacity) for amounts, node in zip(taken, nodes, strict=True))


def why_one_more(
    kind: BaseKind, bases: Iterable[RunningBase], limits: BaseLimits, first: WaitingJob, nodes: Sequence[Node]
) -> str:
    """Return in words why the first job that needs a base server needs one that is not there yet."""
    own = [base for base in bases if base.kind == kind and base.state is BaseState.SERVING]
    if not own:
        return f"no base server has {kind.model}" + (" with deterministic = true" if kind.deterministic else "")
    if not any(leaves_room(base, first, nodes) for base in own):
        return f"no node has room for the job beside the base server of {kind.model} that is there"
    if all(base.waiting > limits.waiting for base in own):
        return f"over {limits.waiting} requests wait at each base server of {kind.model}"
    return f"no base server of {kind.model} has room for its adapters ({limits.adapters} on each)"
