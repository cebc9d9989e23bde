"""Interface between the scheduler and launchers of model servers, and the states that follow a server's end."""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from palestra.disk import write_whole
from palestra.errors import PalestraError, causes_of
from palestra.types.gpus import GpuReading
from palestra.types.states import JobState
from palestra_control.jobs import JobRecord, ProcessResources, Resources, Role
from palestra_service.jobs.deadlines import limit_is_over
from palestra_service.placement.fitting import Node

log = logging.getLogger("palestra.control")
RUN = "run"  # name of the run's folder in a job's folder
LOG_FILE = "log.txt"  # in a job's folder
ENDED_FILE = "ended.json"  # in a job's folder, after its server has ended

# A full disk or quota, a failing or missing disk, no memory, no descriptor, a folder that is read-only at the moment.
MACHINE_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS)
)
SQLITE_MACHINE_ERRORS = frozenset(
    (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY)
)


TAIL_BYTES = 4000


class Ending(StrEnum):
    """How a model server can end, which decides about its restart.

    Attributes:
        COMPLETED: its steps are finished.
        STOPPED: on request, with a checkpoint of its training.
        FAILED: with a reason; a restart would not help.
        LOST: its process or machine was lost; it can continue from its last checkpoint.
    """

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The ending of a model server, with the reason for people."""

    ending: Ending
    reason: str = ""


def ending_of(error: BaseException) -> Ending:
    """Classify an error that ends a job.

    LOST, with a restart if `restarts` allows, for errors that may be transient: `retryable` ones, and those caused by
    the machine's disks or lack of a resource (`MACHINE_ERRORS`). FAILED for all others: the configuration, the model, a
    damaged store, a defect.
    """
    for cause in causes_of(error):
        if isinstance(cause, PalestraError) and cause.retryable:
            return Ending.LOST
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in MACHINE_ERRORS):
            return Ending.LOST
        # Python's own error for text that is not UTF-8 has no code, and means that the file is damaged.
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(cause, sqlite3.OperationalError) and code is not None and code & 0xFF in SQLITE_MACHINE_ERRORS:
            return Ending.LOST
    return Ending.FAILED


def write_ended(folder: Path, ended: Ended) -> None:
    """Write the server's ending into a job's folder, for a scheduler that was not running."""
    write_whole(folder / ENDED_FILE, ended_text(ended).encode())


def ended_text(ended: Ended) -> str:
    """Return the content of `ENDED_FILE` for this ending."""
    return json.dumps({"ending": ended.ending.value, "reason": ended.reason})


def read_ended(folder: Path, name: str = ENDED_FILE) -> Ended | None:
    """Return a server's ending from a file in its folder; None: it was killed, or the file is damaged."""
    path = folder / name
    try:
        found = json.loads(path.read_bytes())
        return Ended(ending=Ending(found["ending"]), reason=str(found["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s can't be read, so how the server ended is not known: %s", path, error)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleOrder:
    """A bundle for one further process of a job. The launcher reserves the bundle; the job starts the process.

    Attributes:
        memory_gib: limit; None: unlimited.
    """

    role: Role
    node: str
    resources: ProcessResources
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A server to start.

    Attributes:
        job_id: of the job, or of the base server, which is used like one.
        folder: of its log, and a job's run or a base server's admissions.
        resources: of its own process, and the placement of a job's bundles.
        memory_gib: limit of its processes; None: unlimited.
    """

    job_id: str
    folder: Path
    node: str
    resources: Resources
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOrder(Order):
    """A model server to start.

    Attributes:
        config: a JobConfig as JSON.
        weights: by policy an absolute folder, or a name of the hub, instead of the policy's `model`.
        base_key: file with the job's key for its base server; None: it has no base server.
        bundles: for its other processes, in the order of `Resources.parts`.
    """

    config: dict[str, Any]
    weights: Mapping[str, str] = field(default_factory=dict)
    base_key: Path | None = None
    bundles: tuple[BundleOrder, ...] = ()


def runner_count(config: Mapping[str, Any]) -> int:
    """Return the number of further processes that play a job's environment."""
    if config.get("kind", "training") != "training":
        return 0
    return int((config.get("environment") or {}).get("runners") or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOrder(Order):
    """A base server to start, in a process like a job's.

    Attributes:
        model: an absolute folder, a built-in model, or a name of the hub.
        deterministic: whether samples and weights must not depend on what else is computed.
        jobs: parent of all jobs' folders.
        dtype: precision of engine and trainer.
        slots: adapters in memory with their moments; None: all.
        address: known to jobs from an earlier start; None: any free one.
    """

    model: str
    deterministic: bool
    jobs: Path
    dtype: str
    slots: int | None
    address: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """A listening model server or base server.

    Attributes:
        url: of its data plane, or the base server's address for jobs.
        devices: indices of its GPUs; (): unknown.
    """

    url: str
    devices: tuple[int, ...] = ()


class Launcher(Protocol):
    """Starts, watches and stops model servers and base servers, which outlive the scheduler.

    A `job_id` may be a base server's. Before `start`, `find` and `stop`, a caller confirms that it still has the store:
    they act in the cluster.
    """

    async def nodes(self) -> list[Node]:
        """Return the machines with all their resources. Raises ServerFailed if the cluster does not answer."""
        ...

    async def gpu_use(self, nodes: Sequence[Node]) -> Mapping[str, GpuReading]:
        """Return figures of the machines' GPUs, by machine; quickly, even if one does not answer.

        Machines without GPUs, and dead ones, are left out.
        """
        ...

    async def start(self, order: ServerOrder | BaseOrder) -> Listening:
        """Start a server, or continue the run in its folder; return when the server listens. Raises PalestraError if
        the server cannot be started; all its resources are released.
        """
        ...

    async def find(self, job_id: str) -> Listening | None:
        """Return a server that was started before; None: there is none, and its resources are released."""
        ...

    async def known(self) -> list[str]:
        """Return the ids of all jobs with a server or resources, including other schedulers'."""
        ...

    async def ended(self, job_id: str, heard: Callable[[Any], None]) -> Ended:
        """Wait until the server has ended for any reason and its resources are released; return how it ended.

        Args:
            heard: called with each report of the server: a job's estimate of its remaining seconds
                (`JobProgress.seconds_left`), or a base server's `BaseLoad`.
        """
        ...

    async def stop(self, job_id: str, grace_seconds: float) -> None:
        """Ask a server to save and end, kill it after `grace_seconds`, and wait until its resources are released."""
        ...

    async def close(self) -> None:
        """Release this object's resources; the servers continue."""
        ...


def following_state(job: JobRecord, ended: Ended, now: float) -> tuple[JobState, str, int]:
    """Return a job's next state after its server's end at `now` (Unix seconds), the reason, and the restarts left."""
    left = job.restarts_left
    if ended.ending is Ending.COMPLETED:
        return JobState.COMPLETED, ended.reason or "its steps are done", left
    if job.cancel_requested:
        return JobState.CANCELLED, f"{job.reason}; {ended.reason}" if ended.reason else job.reason, left
    if ended.ending is Ending.FAILED:
        return JobState.FAILED, ended.reason, left
    if job.time_left(now) == 0.0:  # a restart would have no time left
        reason = limit_is_over(job)
        return JobState.CANCELLED, f"{reason}; {ended.reason}" if ended.reason else reason, left
    if ended.ending is Ending.LOST and left == 0:
        return JobState.FAILED, f"lost {job.restarts_limit + 1} times, at last: {ended.reason}", left
    if ended.ending is Ending.LOST:
        goes_on = "it goes on from its last checkpoint" if job.kind == "training" else "it is started again"
        return JobState.QUEUED, f"{ended.reason}; {goes_on}", left - 1
    return JobState.QUEUED, ended.reason or "it was stopped, and goes on from its checkpoint", left


def log_tail(path: Path) -> str | None:
    """Return the last lines of a log, at most `TAIL_BYTES`; None: unreadable."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return text if size <= TAIL_BYTES else text.partition("\n")[2]
