"""The trackers of a running job, each in its own process, on which the job does not depend; both sides of it.

`python -m palestra.tracking.process SOCKET RUN NAME` sends a running job's rows to a tracker until the job ends. The
job holds the other end of the socket, so the process notices its end, even a kill. It then sends the last rows, and
ends with all that its tracker has started.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.config import SAVED_CONFIG, JobConfig, load_saved_config
from palestra.disk import open_own
from palestra.errors import PalestraError, RunInUse, StoreError
from palestra.process.child import start_process, with_owner
from palestra.process.keeper import kill_session
from palestra.store.browsing import browse, last_state
from palestra.store.tables import events, metric_rows
from palestra.terminal import say
from palestra.tracking.registry import TrackedRun, Tracker, create_tracker, key_of
from palestra.waiting import race

log = logging.getLogger("palestra")
DISK_SECONDS = 0.1  # between two looks at the disk: a tracker can write hundreds of MiB in a second
MOST_SAID = 16 * 2**20  # bytes that a tracker may write to its log


@contextlib.asynccontextmanager
async def tracking(folder: Path, names: Sequence[str]) -> AsyncIterator[None]:
    """Run a process for each tracker inside the block; afterwards each has a few seconds for the last rows.

    A process that fails does not end the block: the error is logged, and the process's output is in
    `RUN/tracking/NAME.log`.
    """
    over = asyncio.Event()
    watches = [asyncio.create_task(_keep(folder, name, over)) for name in names]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*watches)


async def _keep(folder: Path, name: str, over: asyncio.Event) -> None:
    """Start the process of a tracker, and end it after the job; log why it ended before, or with an error."""
    said = folder / FOLDER / f"{name}.log"
    try:
        said.parent.mkdir(mode=0o700, exist_ok=True)
        process = await start_process("palestra.tracking.process", {}, str(folder), name, log=said, computes=False)
    except OSError as error:
        log.error("the tracker %s could not be started: %s", name, error)
        return
    reason = None
    try:
        reason = (await race(process.code(), over.wait(), _too_much(folder, said))).result
    finally:
        await process.end(LINGER_SECONDS if over.is_set() else 0.0)
    if isinstance(reason, str):
        log.error("the tracker %s was ended: %s", name, reason)
    elif await process.code():
        log.error("the tracker %s %s", name, await process.how_ended())


async def _too_much(folder: Path, said: Path) -> str:
    """Wait until a tracker takes the run's disk, and return in words how."""
    # Here, because a tracker that writes or hangs does not come to look itself.
    while True:
        await asyncio.sleep(DISK_SECONDS)
        try:
            written, free = os.stat(said).st_size, shutil.disk_usage(folder).free
        except OSError:  # the log was removed, or the whole run, of which the job itself hears
            continue
        if written > MOST_SAID:
            return f"it wrote more than {MOST_SAID // 2**20} MiB to {said}"
        if free < RESERVE:
            return f"less than {RESERVE // 2**20} MiB are free; what is left is for the run itself"


# The process


LOOK_SECONDS = 1.0
LINGER_SECONDS = 10.0  # after the end of the job; a tracker that needs longer is given up
LOCK_SECONDS = 2 * LINGER_SECONDS  # how long the process of a job that was killed may take to end


def _main(folder: Path, name: str) -> int:
    """Send the rows of a running job to a tracker until the job is over, and return the exit code."""
    over = threading.Event()
    atexit.register(_end_others)  # before those of the tracker's library, so that it is called after them
    with_owner(lambda: _end_soon(over))
    with contextlib.suppress(OSError):
        os.nice(10)  # the job's own work comes first
    try:
        while not (folder / SAVED_CONFIG).exists():  # the job writes it when it begins
            if over.wait(LOOK_SECONDS):
                return 0
        with alone(folder, name):
            tracker = create_tracker(name, tracked_run(folder, name))
            follow_run(folder, tracker, lambda: not over.wait(LOOK_SECONDS))
    except (PalestraError, OSError) as error:
        say(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def _end_soon(over: threading.Event) -> None:
    """End this process a little after the job, even if its tracker hangs."""
    over.set()
    time.sleep(LINGER_SECONDS)
    _end_others()
    os._exit(3)


def _end_others() -> None:
    """Kill everything that this process has started."""
    if os.getsid(0) == os.getpid():  # otherwise the session is that of who started this process
        kill_session(os.getpid(), but=os.getpid())


@contextlib.contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes from sending this run to this tracker inside the block. Raises RunInUse if another process
    does, for longer than one needs to end.
    """
    path = folder / FOLDER / f"{name}.lock"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    until = time.monotonic() + LOCK_SECONDS
    with os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunInUse(f"another process still writes {folder} to {name}") from None
                time.sleep(0.1)
            else:
                break
        yield


FOLDER = "tracking"
RESERVE = 256 * 2**20  # bytes that a tracker leaves free for the run, which needs them more
PIECE = 500  # rows that are read together


def tracked_run(folder: Path, name: str) -> TrackedRun:
    """Return a run as a tracker names it, and create the folder for the tracker's files."""
    config = load_saved_config(folder)
    files = folder / FOLDER / name
    files.mkdir(mode=0o700, parents=True, exist_ok=True)
    return TrackedRun(
        name=config.name, key=key_of(folder), store=folder / "run.db", folder=files, settings=_settings(config)
    )


def _settings(config: JobConfig) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, without where the job runs."""
    found: dict[str, Any] = {}

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping) and value:
                add(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = value

    add(config.model_dump(mode="json", exclude={"server", "run_dir"}), "")
    return found


def check_disk(folder: Path) -> None:
    """Check that the disk has space for a tracker's files."""
    if shutil.disk_usage(folder).free < RESERVE:
        raise StoreError(f"less than {RESERVE // 2**20} MiB are free; what is left is for the run itself")


class Follower:
    """Sends the rows of one run to one tracker, and starts over when sent rows have changed."""

    def __init__(self, folder: Path, tracker: Tracker) -> None:
        self._path, self._folder, self._tracker = folder / "run.db", folder, tracker
        self._begun, self._last, self._digest = False, -1, b""  # of the rows that were handed over

    def look(self) -> int:
        """Send new rows, and return how many."""
        check_disk(self._folder)
        written = 0
        with browse(self._path) as connection:
            if not self._begun or not self._unchanged(connection):
                self._tracker.begin()
                self._begun, self._last = True, -1
            while rows := self._next(connection):
                for step, data, at in rows:
                    self._tracker.write(step, _finite(orjson.loads(data)), at)
                    self._last, self._digest = step, _digest(data)
                    written += 1
        if written:
            self._tracker.flush()
        return written

    def _unchanged(self, connection: Connection) -> bool:
        """Return whether the store has the rows as sent: a resumed job writes those after its checkpoint again."""
        last = connection.execute(select(metric_rows.c.data).where(metric_rows.c.step == self._last)).scalar()
        return self._last < 0 or (last is not None and _digest(last) == self._digest)

    def _next(self, connection: Connection) -> list[tuple[int, str, float]]:
        """Return the next rows (step, data, Unix seconds); a row whose event is not there yet waits for it."""
        ended = func.max(events.c.at).label("at")
        wanted = (
            select(metric_rows.c.step, metric_rows.c.data, ended)
            .join(events, (events.c.step == metric_rows.c.step) & (events.c.kind == "step"))
            .where(metric_rows.c.step > self._last)
            .group_by(metric_rows.c.step)
            .order_by(metric_rows.c.step)
            .limit(PIECE)
        )
        return [(row.step, row.data, row.at) for row in connection.execute(wanted)]


def _finite(row: Mapping[str, float | None]) -> dict[str, float]:
    """Return a row without its step and without non-finite numbers, which JSON has as null."""
    return {k: float(v) for k, v in row.items() if k != "step" and v is not None and math.isfinite(v)}


def _digest(data: str) -> bytes:
    return hashlib.sha256(data.encode()).digest()


def completed(folder: Path) -> bool:
    """Return whether the job of a run has completed."""
    with browse(folder / "run.db") as connection:
        last = last_state(connection)
        return last is not None and last.kind == "completed"


def follow_run(folder: Path, tracker: Tracker, pause: Callable[[], bool]) -> int:
    """Send the rows of a run to a tracker until the job is over, and return how many. `tracker`: is closed at the end.
    `pause`: waits a little; returns False when the job is over, after which the store is read once more.
    """
    follower, written, going = Follower(folder, tracker), 0, True
    while going:
        written += follower.look()
        going = pause()
    written += follower.look()
    tracker.close(completed(folder))
    return written


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[2]), sys.argv[3]))
