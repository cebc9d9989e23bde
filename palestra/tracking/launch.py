"""The trackers of a running job: a process for each, which the job neither waits for nor depends on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from palestra.tracking.follow import FOLDER, RESERVE
from palestra.tracking.process import LINGER_SECONDS, OVER
from palestra.waiting import race

log = logging.getLogger("palestra")
LOOK_SECONDS = 0.5  # between two looks at the disk
MOST_SAID = 16 * 2**20  # bytes that a tracker may write to its log
LAST_BYTES = 16_384  # of a log, in which its last line is looked for


@contextlib.asynccontextmanager
async def tracking(folder: Path, names: Sequence[str]) -> AsyncIterator[None]:
    """Keep a process for each tracker while the block is open; afterwards they have a few seconds for the last rows.

    A process that fails does not end the block; an error is logged, and what it said is in `RUN/tracking/NAME.log`.

    Args:
        names: of the trackers, which `check_trackers` has checked.
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
    try:
        said = folder / FOLDER / f"{name}.log"
        said.parent.mkdir(mode=0o700, exist_ok=True)
        with said.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "palestra.tracking.process",
                str(folder),
                name,
                stdin=PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the job, which then ends the process
            )
    except OSError as error:
        log.error("the tracker %s could not be started: %s", name, error)
        return
    try:
        first = await race(process.wait(), over.wait(), _too_much(folder, said))
        if first.index == 1:
            await _end(process)
    finally:
        _kill(process)
    await process.wait()
    if isinstance(first.result, str):
        log.error("the tracker %s was ended: %s", name, first.result)
    elif process.returncode:
        log.error("the tracker %s ended with code %d: %s", name, process.returncode, _last_line(said))


async def _end(process: Process) -> None:
    """Tell a process that the job is over, and wait for it, for a limited time."""
    assert process.stdin is not None
    process.stdin.write(OVER)
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            await process.wait()


def _kill(process: Process) -> None:
    """End a process and all that it has started, also where the process itself has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own


async def _too_much(folder: Path, said: Path) -> str:
    """Wait until a tracker takes the run's disk, and return in words how."""
    # Looked at here, because a tracker that hangs does not come to look itself.
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            written, free = os.stat(said).st_size, shutil.disk_usage(folder).free
        except OSError:  # the log was removed, or the whole run, of which the job itself hears
            continue
        if written > MOST_SAID:
            return f"it wrote more than {MOST_SAID // 2**20} MiB to {said}"
        if free < RESERVE:
            return f"less than {RESERVE // 2**20} MiB are free; what is left is for the run itself"


def _last_line(path: Path) -> str:
    """Return the last line that a process has written, for people."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - LAST_BYTES, 0))
        lines = file.read(LAST_BYTES).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
    return "what it said can't be read"
