"""`RunnerFleet`: keeps the runners of a job running, which play its environment in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from palestra.client.fleet import Crashes
from palestra.errors import PalestraError
from palestra.rollout.failures import Lost
from palestra.store import RunStore
from palestra.types.progress import JobProgress
from palestra.waiting import cancelled

log = logging.getLogger("palestra.runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """What a runner has to know of its job.

    Attributes:
        url: of the job's data plane.
        key: returns the job's present key.
        concurrency: episodes that one runner plays at the same time.
    """

    url: str
    key: Callable[[], str]
    concurrency: int


class RunnerDied(Exception):
    """A runner has ended before the job was over; the message says how."""


RunnerStarter = Callable[[RunnerOrder, str], Awaitable[None]]
"""(order, worker id) -> runs a runner that claims under this name, and returns when the job is over. Raises RunnerDied.
If it is cancelled, nothing of the runner is left."""


class RunnerFleet:
    """Replaces runners that die, with a growing pause, and has the episodes that they held played again at once.

    As a context manager it runs them: inside of the block they play, and at its end those that are left are ended.
    """

    def __init__(
        self, count: int, order: RunnerOrder, start: RunnerStarter, store: RunStore, progress: JobProgress
    ) -> None:
        """Prepare the fleet.

        Args:
            count: number of runners.
            order: what each of them has to know.
            start: runs one.
            store: of the job, whose episodes runners claim.
            progress: the state that `/status` shows.
        """
        self._count, self._order, self._start = count, order, start
        self._store, self._progress = store, progress
        self._keeping: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await cancelled(*self._keeping)
        finally:
            for number in range(self._count):
                await self._give_back(number, "cancelled: the job was stopped", counts=False)

    async def failure(self) -> None:
        """Wait until a runner can't be kept running.

        Raises:
            WorkerCrashLoop: it died again and again.
        """
        raise await asyncio.shield(self._failure)

    async def _keep(self, number: int) -> None:
        """Run a runner, and others in its place, until the job is over."""
        crashes = Crashes()
        # An earlier process of this job, and its runners with it, may have been killed.
        await self._give_back(number, "cancelled: the job was started again", counts=False)
        while True:
            self._progress.runners += 1
            try:
                await self._start(self._order, _name(number))
                return
            except RunnerDied as error:
                died = str(error)
            finally:
                self._progress.runners -= 1
            await self._give_back(number, f"its runner {died}", counts=True)
            await self._store.log.add_event("runner_died", {"runner": number, "reason": died})
            try:
                pause = crashes.pause_after(f"runner {number}", died)
            except PalestraError as error:
                if not self._failure.done():
                    self._failure.set_result(error)
                return
            log.warning("runner %d %s; started again", number, died)
            await asyncio.sleep(pause)

    async def _give_back(self, number: int, reason: str, counts: bool) -> None:
        """Give back the episodes that a runner held when it ended, before their leases run out.

        Args:
            number: of the runner.
            reason: is recorded with the attempt.
            counts: whether it counts as an attempt.
        """
        episodes = self._store.episodes
        for episode in await episodes.claimed_by(_name(number)):
            with contextlib.suppress(*Lost):  # its lease ran out at this moment
                await episodes.abort(episode.episode_id, episode.fence, reason, discard=False, counts=counts)


def _name(number: int) -> str:
    return f"runner-{number}"
