"""The trackers of a running job, each in its own process, on which the job does not depend; both sides of it.

`python -m palestra.tracking.process SOCKET RUN NAME` sends a running job's rows to a tracker until the job ends. The
job holds the other end of the socket, so the process notices its end, even a kill. A job that ends normally announces
it there and then ends the processes of its trackers; after a kill, the process does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from palestra.config import SAVED_CONFIG
from palestra.disk import open_own
from palestra.errors import PalestraError, RunInUse
from palestra.process.child import start_process, with_owner
from palestra.terminal import say
from palestra.tracking.follow import FOLDER, RESERVE, check_disk, follow_run, tracked_run
from palestra.tracking.registry import create_tracker
from palestra.waiting import race

log = logging.getLogger("palestra")
DISK_SECONDS = 0.5  # between two looks at the disk
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
        await process.end(LINGER_SECONDS if over.is_set() else 0.0, OVER if over.is_set() else b"")
    if isinstance(reason, str):
        log.error("the tracker %s was ended: %s", name, reason)
    elif await process.code():
        log.error("the tracker %s %s", name, await process.how_ended())


async def _too_much(folder: Path, said: Path) -> str:
    """Wait until a tracker takes the run's disk, and return in words how."""
    # Looked at here, because a tracker that hangs does not come to look itself.
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


OVER = b"over"  # what a job that ends says to its trackers
LOOK_SECONDS = 1.0
LINGER_SECONDS = 10.0  # after the end of the job; a tracker that needs longer is given up
ROOM_SECONDS = 0.1  # between two looks at the room on the disk: a tracker can write hundreds of MiB in a second
LOCK_SECONDS = 2 * LINGER_SECONDS  # how long the process of a job that was killed may take to end


def _main(folder: Path, name: str) -> int:
    """Send the rows of a running job to a tracker until the job is over, and return the exit code."""
    over, killed = threading.Event(), threading.Event()
    atexit.register(_end_group, killed)  # before those of the tracker's library, so that it is called after them
    with_owner(lambda said: _end_soon(said, over, killed))
    threading.Thread(target=_watch_disk, args=(folder, name), daemon=True).start()
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


def _end_soon(said: bytes, over: threading.Event, killed: threading.Event) -> None:
    """End this process a little after the job, even if its tracker hangs."""
    if said != OVER:
        killed.set()
    over.set()
    time.sleep(LINGER_SECONDS)
    _end_group(killed)
    os._exit(3)


def _end_group(killed: threading.Event) -> None:
    """If the job was killed, kill this process and everything that it started."""
    if killed.is_set() and os.getpgrp() == os.getpid():  # otherwise the group is that of who started this process
        os.killpg(0, signal.SIGKILL)


def _watch_disk(folder: Path, name: str) -> None:
    """End this process as soon as the disk is too full for the run, even during a tracker's write."""
    while True:
        try:
            check_disk(folder)
        except (PalestraError, OSError) as error:
            say(f"{name}: {error}", file=sys.stderr)
            os._exit(1)
        time.sleep(ROOM_SECONDS)


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


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[2]), sys.argv[3]))
