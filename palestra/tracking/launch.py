"""The trackers of a running job: a process for each, which the job neither waits for nor depends on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from palestra.tracking.follow import FOLDER
from palestra.tracking.process import LINGER_SECONDS
from palestra.waiting import race

log = logging.getLogger("palestra")


@contextlib.asynccontextmanager
async def tracking(folder: Path, names: Sequence[str]) -> AsyncIterator[None]:
    """Keep a process for each tracker while the block is open; afterwards they have a few seconds for the last rows.

    A process that fails does not end the block; an error is logged, and what it said is in `RUN/tracking/NAME.log`.

    Args:
        folder: of the run, with its configuration.
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
    if (await race(process.wait(), over.wait())).index == 1:
        await _end(process)
    if process.returncode:
        log.error("the tracker %s ended with code %d: %s", name, process.returncode, _last_line(said))


async def _end(process: Process) -> None:
    """Tell a process that the job is over, and wait for it, for a limited time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), LINGER_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(path: Path) -> str:
    """Return the last line that a process has written, for people."""
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
    return "what it said can't be read"
