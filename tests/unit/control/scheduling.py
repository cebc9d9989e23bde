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


class Fence:
    """Calls a launcher, and notes which acts in the cluster do not directly follow a confirmation of the lock."""

    def __init__(self, store, launcher) -> None:
        self._launcher, self._confirmed, self._now = launcher, store.confirmed, set()
        self.unconfirmed: list[str] = []
        store.confirmed = self._confirm

    async def _confirm(self) -> None:
        await self._confirmed()
        task = asyncio.current_task()
        self._now.add(task)
        asyncio.get_running_loop().call_soon(self._now.discard, task)  # runs as soon as the task waits for anything

    def __getattr__(self, name: str):
        method = getattr(self._launcher, name)
        if name not in ("start", "find", "stop"):
            return method

        async def act(*arguments):
            if asyncio.current_task() not in self._now:
                self.unconfirmed.append(name)
            return await method(*arguments)

        return act


@asynccontextmanager
async def scheduling(store, folder, launcher, **more):
    confirmed, fence = store.confirmed, Fence(store, launcher)
    scheduler = JobScheduler(store, fence, folder / "jobs", PlacementPolicy(), **more)
    task = asyncio.ensure_future(scheduler.run())
    try:
        yield scheduler
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.confirmed = confirmed
    assert fence.unconfirmed == []


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
