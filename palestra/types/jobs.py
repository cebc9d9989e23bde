"""Jobs: the request that a tenant submits, and the record that the control store keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from palestra.config import JobKind as JobKind  # exported again, because the records here use it
from palestra.errors import InvalidRequest
from palestra.types.states import JobState

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
    """The resources of one process, or of processes that are on one machine together.

    Attributes:
        cpus: cores.
        gpus: a part of one GPU below 1, whole GPUs above.
        memory_gib: memory of its processes; 0: not counted, and they may use a share of the node.
        gpu_kind: the kind of GPU that its node has to have, as Ray names it (`H100`); None: any node.
        labels: that its node has to have.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    gpu_kind: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse amounts that no machine can give.

        Raises:
            InvalidRequest: a number is negative, over `MOST` or too fine, or `gpus` is neither a part of one nor whole;
                or a kind of GPU is asked for without any GPU.
        """
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

    Attributes not listed here mean what they mean in `ProcessResources`.

    Attributes:
        role: `engine` (an inference worker), `trainer` (a rank) or `runner`.
        count: how many processes there are, at least 1.
    """

    role: Role
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources(ProcessResources):
    """The resources that a job holds while it is STARTING or RUNNING: those of its own process, and its bundles.

    Attributes not listed here mean what they mean in `ProcessResources`.

    Attributes:
        bundles: of its processes that may be on other nodes, each role once; (): all of the job is on one node.
        placement: how its own process and its bundles are placed. `PACK`: on few nodes; `STRICT_PACK`: on one node;
            `SPREAD`: on many nodes.
    """

    bundles: tuple[Bundle, ...] = ()
    placement: Placement = "PACK"

    @property
    def parts(self) -> tuple[ProcessResources, ...]:
        """Return what the job's own process holds, then what each process of its bundles does, role by role."""
        return (self, *(bundle for bundle in self.bundles for _ in range(bundle.count)))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """A job as it is submitted.

    Attributes:
        name: for people; need not be unique.
        kind: `training`, or `inference`, which serves a model.
        priority: jobs of a higher priority are placed first.
        config: a JobConfig as JSON.
        resources: what the job holds while it runs.
        attached: whether it is cancelled when its client has been gone for longer than the grace time.
        restarts_limit: how often it is started again after its server or its machine was lost.
        private: whether only its owner and the tenant's admins see it.
        time_limit_seconds: how long it may be RUNNING, over all of its starts; None: any time.
        from_job: job of the same tenant whose weights it starts from; None: the configuration's model.
        from_step: step of that job's checkpoint; None without `from_job`.
        from_newest: True: no step was requested, so `from_step` is the newest one at the time of submission.
        adapters: that it has on a shared base; 0: it asks for none.
    """

    name: str
    kind: JobKind = "training"
    priority: Priority = "normal"
    config: dict[str, Any]
    resources: Resources
    attached: bool = False
    restarts_limit: int = 3
    private: bool = False
    time_limit_seconds: float | None = None
    from_job: str | None = None
    from_step: int | None = None
    from_newest: bool = False
    adapters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """One job, as the control store keeps it.

    Attributes not listed here mean what they mean in `JobRequest`.

    Attributes:
        job_id: unique in the control store.
        tenant, user: the owner.
        state: of its lifecycle; see `states.TRANSITIONS`.
        reason: of the newest change of state; "": there is nothing to say.
        created_at: Unix seconds.
        changed_at: Unix seconds of the newest change of state.
        starts: how often it became STARTING.
        restarts_left: how often it may still be started again after a loss.
        ran_seconds: how long it was RUNNING until `changed_at`, over all of its starts.
        url: of its data plane; None: there is none at the moment.
        run_dir: folder of its run; None before the first start.
        node: where its own process runs or ran last; None before the first start.
        bundle_nodes: where its bundles run or ran last, in the order of `Resources.parts` without its own process.
        cancel_requested: whether it ends as soon as it can.
        log_tail: last lines of its log, kept when it ends; None: there are none.
        base_id: base server of the service on which it runs or ran last; None: it has a model of its own, or has not
            been started.
    """

    job_id: str
    tenant: str
    user: str
    name: str
    kind: JobKind
    priority: Priority
    config: dict[str, Any]
    resources: Resources
    attached: bool
    private: bool
    state: JobState
    reason: str
    created_at: float
    changed_at: float
    starts: int
    restarts_limit: int
    restarts_left: int
    time_limit_seconds: float | None
    ran_seconds: float
    url: str | None
    run_dir: str | None
    node: str | None
    bundle_nodes: tuple[str, ...]
    cancel_requested: bool
    log_tail: str | None
    from_job: str | None
    from_step: int | None
    adapters: int
    base_id: str | None

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, so that its state never changes again."""
        return self.state not in OPEN_STATES

    def time_left(self, now: float) -> float | None:
        """Return how many seconds of the time limit are left, at least 0; None: there is no limit.

        Args:
            now: Unix seconds.
        """
        if self.time_limit_seconds is None:
            return None
        since_changed = max(now - self.changed_at, 0.0) if self.state is JobState.RUNNING else 0.0
        return max(self.time_limit_seconds - self.ran_seconds - since_changed, 0.0)

    def expected_seconds(self, now: float) -> float | None:
        """Return for how many seconds from `now` (Unix seconds) the job will be RUNNING at most.

        None: unknown. Infinite: a served model, which runs until it is cancelled.
        """
        left = self.time_left(now)
        # A served model never ends by itself, so placement must not keep its room reserved for jobs that wait.
        if left is None and self.kind == "inference":
            return math.inf
        return left


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChange:
    """One change of a job's state.

    Attributes:
        job_id: of the job.
        number: grows by one with every change of a job of the same tenant, so that numbers tell a tenant nothing about
            the jobs of others.
        at: Unix seconds.
        previous: state before; None: the job was submitted.
        following: state after.
        reason: why, for people.
    """

    job_id: str
    number: int
    at: float
    previous: JobState | None
    following: JobState
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    """A part of a list of jobs, newest first.

    Attributes:
        jobs: the records of this page.
        cursor: pass it to get the next page; None: this is the last one.
    """

    jobs: tuple[JobRecord, ...]
    cursor: str | None


class JobFields(TypedDict, total=False):
    """The columns of a job that the scheduler may set, together with a change of state or without one."""

    url: str | None
    run_dir: str | None
    node: str | None
    bundle_nodes: tuple[str, ...]
    restarts_left: int
    log_tail: str | None
    base_id: str | None
