"""Periodic work of an open job: expiring leases, counting episodes, removing pictures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from palestra.errors import PalestraError
from palestra.session import SeatBook
from palestra.store import RunStore
from palestra.store.unnamed_pictures import remove_unnamed_pictures
from palestra.types.progress import JobProgress, Phase, PhaseProgress
from palestra.waiting import cancelled

log = logging.getLogger("palestra")


SWEEP_SECONDS = 600.0  # between two looks for pictures that nothing needs


@asynccontextmanager
async def looked_after(
    store: RunStore, progress: JobProgress, seats: SeatBook | None, max_episode_seconds: float
) -> AsyncIterator[None]:
    """Expire leases, count episodes, and remove unused pictures while the block is open.

    Args:
        seats: external players of the job's episodes; None: none.
        max_episode_seconds: limit of one attempt at an episode.
    """

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

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await remove_unnamed_pictures(store, max_episode_seconds)
            except (PalestraError, OSError) as error:  # a disk that is gone for a while, perhaps: try again
                log.error("pictures that nothing needs can't be removed now: %s", error)

    tasks = asyncio.create_task(watch()), asyncio.create_task(sweep())
    try:
        yield
    finally:
        await cancelled(*tasks)


async def _count(store: RunStore, progress: JobProgress) -> None:
    """Update the counts of episodes in `progress`."""
    progress.episodes = await store.episodes.counts()
    if (wanted := progress.collecting) is not None:
        found = PhaseProgress(*await store.groups.settled_of_step(wanted.kind, wanted.step))
        if progress.collecting == wanted:  # the same phase as before the query
            # Groups that are replaced, since they teach nothing, are not settled any more: that is no way back.
            before = 0 if progress.collected is None else progress.collected.done
            progress.collected = replace(found, done=min(max(found.done, before), found.due))
