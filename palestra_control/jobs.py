"""Jobs: the request that a tenant submits, and the record that the control store keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from palestra.config import JobKind as JobKind  # exported again, because the records here use it
from palestra.errors import InvalidRequest
from palestra.types.states import BaseState, JobState

Priority = Literal["low", "normal", "high"]
Role = Literal["engine", "trainer", "runner"]
Placement = Literal["PACK", "STRICT_PACK", "SPREAD"]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # ascending: jobs of the last one are placed first

OPEN_STATES = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
LIVE_STATES = frozenset({JobState.STARTING, JobState.RUNNING})  # those that hold resources
SHARES = 10_000  # the smallest amount that can be requested is one share of a core or GPU
MOST = 1e9  # cores, GPUs or GiB: far more than any cluster has, and exact as a float when counted in shares


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResources:
    """The resources of one process, or of processes together on one machine.

    Attributes:
        gpus: a fraction of one GPU below 1, whole GPUs above.
        memory_gib: 0: not counted; the processes may use a share of the node.
        gpu_kind: required kind of GPU, as Ray names it (`H100`); None: any node.
        labels: required labels of the node.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    gpu_kind: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise InvalidRequest for amounts that no machine can give."""
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus), ("memory_gib", self.memory_gib)):
            if not 0 <= amount <= MOST:  # also refuses NaN
                raise InvalidRequest(
                    f"{name} is {amount}; it has to be a number from 0 to {MOST:g}", f"resources.{name}"
                )
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            # Placement counts shares as integers, because sums of floats such as 0.1 would not add up to 1.
            if abs(amount * SHARES - round(amount * SHARES)) > 1e-6 * max(1.0, amount):
                raise InvalidRequest(f"{name} is {amount}; give at most four decimals", f"resources.{name}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidRequest(f"gpus is {self.gpus}; give a part of one, or whole ones", "resources.gpus")
        if self.cpus == 0 and self.gpus == 0:
            raise InvalidRequest(
                "cpus and gpus are 0; each process of a job needs a part of a CPU or of a GPU", "resources.cpus"
            )
        if self.gpu_kind is not None and self.gpus == 0:
            raise InvalidRequest(f"gpu_kind is {self.gpu_kind!r}, and gpus is 0; ask for GPUs", "resources.gpu_kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle(ProcessResources):
    """The resources of each process of one role, which may be on another node than the job's own process.

    Other attributes are those of `ProcessResources`.

    Attributes:
        role: `engine` (an inference worker), `trainer` (a rank) or `runner`.
        count: number of processes, at least 1.
    """

    role: Role
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources(ProcessResources):
    """The resources of a STARTING or RUNNING job: those of its own process, and its bundles.

    Other attributes are those of `ProcessResources`.

    Attributes:
        bundles: each role once; (): the whole job is on one node.
        placement: `PACK`: on few nodes; `STRICT_PACK`: on one node; `SPREAD`: on many nodes.
    """

    bundles: tuple[Bundle, ...] = ()
    placement: Placement = "PACK"

    @property
    def parts(self) -> tuple[ProcessResources, ...]:
        """Return the resources of the job's own process, then of each process of its bundles, role by role."""
        return (self, *(bundle for bundle in self.bundles for _ in range(bundle.count)))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """A job as it is submitted.

    Attributes:
        name: for people; need not be unique.
        kind: `training`, or `inference`, which serves a model.
        config: a JobConfig as JSON.
        attached: whether it is cancelled when its client has been disconnected for longer than the grace time.
        restarts_limit: how often it is restarted after the loss of its server or machine.
        time_limit_seconds: total time as RUNNING, over all starts; None: unlimited.
        from_job: job of the same tenant whose weights it starts from; None: the configuration's model.
        from_step: step of that job's checkpoint; None without `from_job`.
        from_newest: whether `from_step` is the newest one at submission, because none was requested.
        adapters: number on a shared base; 0: it does not use one.
    """

    name: str
    kind: JobKind = "training"
    priority: Priority = "normal"
    config: dict[str, Any]
    resources: Resources
    attached: bool = False
    restarts_limit: int = 3
    time_limit_seconds: float | None = None
    from_job: str | None = None
    from_step: int | None = None
    from_newest: bool = False
    adapters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord(JobRequest):
    """One job in the control store. `from_newest` is False: its step is known.

    Attributes:
        reason: of the newest state change; may be empty.
        created_at: Unix seconds.
        changed_at: Unix seconds of the newest state change.
        starts: how often it became STARTING.
        restarts_left: remaining restarts after a loss.
        ran_seconds: total time as RUNNING until `changed_at`, over all starts.
        url: of its data plane; None: not running.
        run_dir: None before the first start.
        node: of its own process, now or last; None before the first start.
        bundle_nodes: of its bundles, now or last, in the order of `Resources.parts` without its own process.
        cancel_requested: whether it ends as soon as it can.
        log_tail: last lines of its log, kept when it ends.
        base_id: the service's base server that it uses or used last; None: it has its own model, or was never started.
    """

    job_id: str
    tenant: str
    user: str
    state: JobState
    reason: str
    created_at: float
    changed_at: float
    starts: int
    restarts_left: int
    ran_seconds: float
    url: str | None
    run_dir: str | None
    node: str | None
    bundle_nodes: tuple[str, ...]
    cancel_requested: bool
    log_tail: str | None
    base_id: str | None

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended for good."""
        return self.state not in OPEN_STATES

    def time_left(self, now: float) -> float | None:
        """Return the remaining seconds of the time limit, at least 0; None: no limit. `now` is in Unix seconds."""
        if self.time_limit_seconds is None:
            return None
        since_changed = max(now - self.changed_at, 0.0) if self.state is JobState.RUNNING else 0.0
        return max(self.time_limit_seconds - self.ran_seconds - since_changed, 0.0)

    def expected_seconds(self, now: float) -> float | None:
        """Return the longest time, in seconds from `now` (Unix seconds), that the job will be RUNNING.

        None: unknown. Infinite: a served model, which runs until it is cancelled.
        """
        left = self.time_left(now)
        # A served model never ends by itself, so placement must not keep its room reserved for jobs that wait.
        if left is None and self.kind == "inference":
            return math.inf
        return left


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    """A page of a list of jobs, newest first.

    Attributes:
        cursor: of the next page; None: this is the last one.
    """

    jobs: tuple[JobRecord, ...]
    cursor: str | None


class JobFields(TypedDict, total=False):
    """The job columns that the scheduler may set, with or without a state change."""

    url: str | None
    run_dir: str | None
    node: str | None
    bundle_nodes: tuple[str, ...]
    restarts_left: int
    log_tail: str | None
    base_id: str | None


class BaseKind(NamedTuple):
    """What jobs need from a base server; jobs with equal kinds may share one.

    Attributes:
        deterministic: whether its samples and weights have the same bits whatever else it computes.
    """

    model: str
    deterministic: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLoad:
    """The load of a base server, as it reports it.

    Attributes:
        waiting: training requests in its queue, including running ones.
        longest_wait: seconds since the oldest arrived; 0.0: none waits.
        tokens: computed by the trainer for present jobs; each request without tokens counts a fixed number.
    """

    waiting: int = 0
    longest_wait: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """A base server in the control store.

    Attributes:
        reason: of the newest state change.
        address: for jobs; kept across restarts. None before the first start.
        created_at: Unix seconds.
        changed_at: Unix seconds of the newest state change.
        starts: how often it became LOADING.
    """

    base_id: str
    kind: BaseKind
    state: BaseState
    reason: str
    node: str
    resources: Resources
    address: str | None
    created_at: float
    changed_at: float
    starts: int
