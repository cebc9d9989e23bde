"""What the scheduler asks of whatever runs model servers."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import PalestraError
from palestra.scheduler.fitting import Node
from palestra.schemas.jobs import Resources

LOG_FILE = "log.txt"  # in a job's folder
ENDED_FILE = "ended.json"  # likewise, since its server ended

# A full disk or quota, a disk that fails or is gone, no memory, no descriptor, a folder that is read-only for now.
MACHINE_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS)
)
SQLITE_MACHINE_ERRORS = frozenset(
    (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY)
)


class Ending(StrEnum):
    """How a model server ended."""

    COMPLETED = "completed"  # its steps are done
    STOPPED = "stopped"  # it was asked to; what was trained is in a checkpoint
    FAILED = "failed"  # it can't go on, and says why: starting it again would not help
    LOST = "lost"  # its process or its machine is gone; it can go on from its last checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What became of a model server."""

    ending: Ending
    reason: str = ""


def ending_of(error: BaseException) -> Ending:
    """Return how a job ends that an error ends: the one rule for all of them.

    LOST, so it is started again as often as `restarts` allows, where another start may go better: an error that is
    `retryable`, or one that is caused by what the machine is short of at the moment or by its disks (`MACHINE_ERRORS`).
    FAILED for all others: the configuration, the model, a damaged store, a defect.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PalestraError) and cause.retryable:
            return Ending.LOST
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in MACHINE_ERRORS):
            return Ending.LOST
        # Python's own error, about text that is no UTF-8, has no code: the file is damaged.
        code = getattr(cause, "sqlite_errorcode", None)
        if isinstance(cause, sqlite3.OperationalError) and code is not None and code & 0xFF in SQLITE_MACHINE_ERRORS:
            return Ending.LOST
        cause = cause.__cause__ or cause.__context__
    return Ending.FAILED


def write_ended(folder: Path, ended: Ended) -> None:
    """Leave in a job's folder how its server ended, for a scheduler that was not there to hear it."""
    temporary = folder / f".{ENDED_FILE}"
    temporary.write_text(ended_text(ended))
    temporary.replace(folder / ENDED_FILE)


def ended_text(ended: Ended) -> str:
    """Return what `ENDED_FILE` holds for this ending."""
    return json.dumps({"ending": ended.ending.value, "reason": ended.reason})


def read_ended(folder: Path) -> Ended | None:
    """What `write_ended` left; None: nothing, so the server did not come to its end."""
    try:
        found = json.loads((folder / ENDED_FILE).read_text())
        return Ended(ending=Ending(found["ending"]), reason=str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOrder:
    """A model server to be started."""

    job_id: str
    config: dict[str, Any]  # a JobConfig
    folder: Path  # of the job: its run, and its log
    node: str
    resources: Resources
    weights: str | None = None  # an absolute folder, or a name of the hub; None: what the configuration's model names
    memory_gib: float | None = None  # that its processes may use; a job that uses more is ended. None: any amount


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """A model server that answers."""

    url: str
    devices: tuple[int, ...] = ()  # the GPUs that it was given, by their index on its machine; none: it does not say


class Launcher(Protocol):
    """Starts, watches and stops model servers. They outlive the scheduler."""

    async def nodes(self) -> list[Node]:
        """The machines that there are, with all that they have.

        Raises:
            ServerFailed: the cluster does not answer.
        """
        ...

    async def start(self, order: ServerOrder) -> Listening:
        """Start a model server, or go on with the run that is in its folder; returns when it listens.

        Raises:
            PalestraError: it can't be started, and says why; nothing of it is left.
        """
        ...

    async def find(self, job_id: str) -> Listening | None:
        """A server that was started before; None: there is none, and nothing is left of one."""
        ...

    async def known(self) -> list[str]:
        """The jobs of which there is anything, a server or what it holds, whoever started it."""
        ...

    async def ended(self, job_id: str, heard: Callable[[float | None], None]) -> Ended:
        """Return when the server has ended, however it did; nothing of it is left then.

        Args:
            job_id: of the job that the server runs.
            heard: called each time the server answers, with the job's own estimate of the seconds that it has left
                (`JobProgress.seconds_left`). The estimate is None while there is none.
        """
        ...

    async def stop(self, job_id: str, grace_seconds: float) -> None:
        """Ask it to save and end; after the grace time its process is killed. Nothing of it is left then."""
        ...

    async def close(self) -> None:
        """Let go of everything; servers go on."""
        ...
