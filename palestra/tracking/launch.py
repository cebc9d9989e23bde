"""The trackers of a running job, each in its own process, on which the job does not depend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from palestra.process.child import start_process
from palestra.tracking.follow import FOLDER, RESERVE
from palestra.tracking.process import LINGER_SECONDS, OVER
from palestra.waiting import race

log = logging.getLogger("palestra")
LOOK_SECONDS = 0.5  # between two looks at the disk
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
        await asyncio.sleep(LOOK_SECONDS)
        try:
            written, free = os.stat(said).st_size, shutil.disk_usage(folder).free
        except OSError:  # the log was removed, or the whole run, of which the job itself hears
            continue
        if written > MOST_SAID:
            return f"it wrote more than {MOST_SAID // 2**20} MiB to {said}"
        if free < RESERVE:
            return f"less than {RESERVE // 2**20} MiB are free; what is left is for the run itself"
