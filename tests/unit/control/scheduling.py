"""A scheduler that runs on a launcher of nothing, and what is waited for then."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from palestra.types.states import JobState
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.placement.placement import PlacementPolicy
from unit.control import building


async def submit(store, *arguments, **values):
    """A second later than the one before, so that their order is certain."""
    store.clock.advance(1)
    return await building.submit(store, *arguments, **values)


@asynccontextmanager
async def scheduling(store, folder, launcher, **more):
    scheduler = JobScheduler(store, launcher, folder / "jobs", PlacementPolicy(), **more)
    task = asyncio.ensure_future(scheduler.run())
    try:
        yield scheduler
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def in_state(store, job_id: str, *states: JobState):
    async def ready() -> bool:
        return (await store.job(None, job_id)).state in states

    return ready


async def states_of(store, job_id: str) -> list[str]:
    return [change.following.value for change in await store.changes(None, job_id)]


async def is_true(found: bool) -> bool:
    return found


async def is_empty(found) -> bool:
    return not found
