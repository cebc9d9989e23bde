"""What has to be done again and again while a job is open: leases expire, and episodes are counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from palestra.session import SeatBook
from palestra.store import RunStore
from palestra.types.progress import JobProgress, Phase, PhaseProgress
from palestra.waiting import cancelled

log = logging.getLogger("palestra")


@asynccontextmanager
async def looked_after(store: RunStore, progress: JobProgress, seats: SeatBook | None) -> AsyncIterator[None]:
    """Expire leases, of seats too, and keep the counts of episodes up to date, while the block is open."""

    async def watch() -> None:
        counted: tuple[int, Phase | None] = (-1, None)
        said = ""
        while True:
            await asyncio.sleep(0.5)
            try:
                await store.episodes.expire_leases()
                if seats is not None:
                    seats.expire()
                if counted != (store.db.commits, progress.collecting):
                    counted = (store.db.commits, progress.collecting)
                    await _count(store, progress)
                said = ""
            except Exception as error:  # noqa: BLE001 - a full disk, perhaps: try again
                if str(error) != said:
                    said = str(error)
                    log.error("leases can't be looked after now: %s: %s", type(error).__name__, error)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        await cancelled(task)


async def _count(store: RunStore, progress: JobProgress) -> None:
    """Update the counts of episodes in `progress`."""
    progress.episodes = await store.episodes.counts()
    if (wanted := progress.collecting) is not None:
        found = PhaseProgress(*await store.groups.settled_of_step(wanted.kind, wanted.step))
        if progress.collecting == wanted:  # the same phase as before the query
            progress.collected = found
