"""`python -m palestra.tracking.process SOCKET RUN NAME`: sends a running job's rows to a tracker until the job ends.

The job holds the other end of the socket, so this process notices its end, even a kill. A job that ends normally
announces it there and then ends its trackers' processes; after a kill, this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from palestra.config import SAVED_CONFIG
from palestra.disk import open_own
from palestra.errors import PalestraError, RunInUse
from palestra.process.child import with_owner
from palestra.terminal import say
from palestra.tracking.follow import FOLDER, check_disk, follow_run, tracked_run
from palestra.tracking.registry import create_tracker

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
    """Keep other processes from sending this run to this tracker inside the block.

    Raises:
        RunInUse: another process does, for longer than one needs to end.
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
