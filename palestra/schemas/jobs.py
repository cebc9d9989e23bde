"""What a tenant asks the scheduler for, and what the scheduler knows about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from palestra.config import JobKind as JobKind  # a part of the records here
from palestra.errors import InvalidRequest
from palestra.schemas.states import JobState

Priority = Literal["low", "normal", "high"]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # from the last to be placed to the first

OPEN_STATES = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
LIVE_STATES = frozenset({JobState.STARTING, JobState.RUNNING})  # those that hold resources
SHARES = 10_000  # of a device or a core: the finest that can be asked for is one of these
MOST = 1e9  # of cores, GPUs or GiB: far beyond any cluster, and exact when it is counted in shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a job holds while it is STARTING or RUNNING."""

    cpus: float = 1.0
    gpus: float = 0.0  # a part of one below 1, whole ones above
    memory_gib: float = 0.0  # 0: not counted, and a share of the node may be used

    def __post_init__(self) -> None:
        """Refuse what no machine could give.

        Raises:
            InvalidRequest: a number is negative, over `MOST`, too fine, or the GPUs are neither a part nor whole.
        """
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus), ("memory_gib", self.memory_gib)):
            if not 0 <= amount <= MOST:  # also refuses NaN
                raise InvalidRequest(
                    f"{name} is {amount}; it has to be a number from 0 to {MOST:g}", f"resources.{name}"
                )
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if abs(amount * SHARES - round(amount * SHARES)) > 1e-6 * max(1.0, amount):
                raise InvalidRequest(f"{name} is {amount}; give at most four decimals", f"resources.{name}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise InvalidRequest(f"gpus is {self.gpus}; give a part of one, or whole ones", "resources.gpus")
        if self.cpus == 0 and self.gpus == 0:
            raise InvalidRequest("a job needs a part of a CPU or of a GPU", "resources.cpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """What is submitted."""

    name: str
    kind: JobKind = "training"
    priority: Priority = "normal"
    config: dict[str, Any]  # a JobConfig as JSON
    resources: Resources
    attached: bool = False  # cancelled when its client is gone for longer than the grace time
    restarts_limit: int = 3  # how often it is started again after its server or its machine was lost
    private: bool = False  # only its owner and the tenant's admins see it
    time_limit_seconds: float | None = None  # how long it may be RUNNING, over all of its starts; None: any time
    from_job: str | None = None  # of the same tenant, whose weights it starts from; None: the configuration's model
    from_step: int | None = None  # of the checkpoint; None without `from_job`
    from_newest: bool = False  # nobody asked for that step: it was the newest when the job was submitted


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """One job, as the control store has it."""

    job_id: str
    tenant: str
    user: str
    name: str
    kind: JobKind
    priority: Priority
    config: dict[str, Any]  # a JobConfig as JSON
    resources: Resources
    attached: bool
    private: bool  # only its owner and the tenant's admins see it
    state: JobState
    reason: str  # of the newest change; "" where there is nothing to say
    created_at: float  # Unix seconds
    changed_at: float  # Unix seconds, of the newest change of state
    starts: int  # how often it became STARTING
    restarts_limit: int
    restarts_left: int
    time_limit_seconds: float | None  # how long it may be RUNNING, over all of its starts; None: any time
    ran_seconds: float  # how long it was RUNNING until `changed_at`, over all of its starts
    url: str | None  # of its data plane; None while there is none
    run_dir: str | None  # None before the first start
    node: str | None  # where it runs or ran last; None before the first start
    cancel_requested: bool
    log_tail: str | None  # its last lines, kept when it ends; None: there are none
    from_job: str | None  # whose weights it starts from; None: those of the configuration's model
    from_step: int | None  # of the checkpoint; None without `from_job`

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state not in OPEN_STATES

    def time_left(self, now: float) -> float | None:
        """Return the seconds that are left of the time limit at `now` (Unix seconds), at least 0; None: no limit."""
        if self.time_limit_seconds is None:
            return None
        since_changed = max(now - self.changed_at, 0.0) if self.state is JobState.RUNNING else 0.0
        return max(self.time_limit_seconds - self.ran_seconds - since_changed, 0.0)

    def expected_seconds(self, now: float) -> float | None:
        """Return how long the job will be RUNNING from `now` (Unix seconds) on, at most.

        None: unknown. Infinite: until it is cancelled.
        """
        left = self.time_left(now)
        if left is None and self.kind == "inference":
            return math.inf
        return left


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChange:
    """One move of one job. Numbers grow by one with every change in a tenant, so they tell nothing about others."""

    job_id: str
    number: int
    at: float  # Unix seconds
    previous: JobState | None  # None: it was submitted
    following: JobState
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    """A part of a list, newest first."""

    jobs: tuple[JobRecord, ...]
    cursor: str | None  # give it back for what follows; None: this is the end


class JobFields(TypedDict, total=False):
    """What the scheduler may set on a job, together with a change of state or without one."""

    url: str | None
    run_dir: str | None
    node: str | None
    restarts_left: int
    log_tail: str | None
