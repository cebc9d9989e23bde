"""Reading of runs in threads, so that the event loop is never held up."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from palestra.dashboard.answers import RunAnswer
from palestra.dashboard.episode import EpisodeReading, read_reading
from palestra.dashboard.progress import describe_run
from palestra.dashboard.runs import Run
from palestra.errors import NotFound

T = TypeVar("T")
READINGS = 6  # episodes that are kept for further pages of their tokens
AT_ONCE = 2  # reads at the same time, so that many pages do not hold up a job
DESCRIBED_SECONDS = 0.9


class Reader:
    """Reads runs in threads, a few at the same time, and keeps the episodes that were read last."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs: Mapping[str, Run] = {run.name: run for run in runs}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._described: dict[str, tuple[float, RunAnswer]] = {}
        self._readings: OrderedDict[tuple[str, str], tuple[tuple[int, ...], EpisodeReading]] = OrderedDict()

    def run(self, name: str) -> Run:
        """Return a run by its name.

        Raises:
            NotFound: the page has no such run.
        """
        if name not in self.runs:
            raise NotFound(f"there is no run {name!r} here; there are {', '.join(self.runs)}")
        return self.runs[name]

    async def read(self, run: Run, work: Callable[[], T]) -> T:
        """Return the result of a function that blocks.

        Args:
            run: that is read.
            work: reads it.
        """
        async with self._room:
            return await asyncio.to_thread(work)

    async def described(self, run: Run) -> RunAnswer:
        """Return how far a run is; a second old at most, so that many pages ask for it no more often than one."""
        now = time.monotonic()
        if (known := self._described.get(run.name)) is not None and now - known[0] < DESCRIBED_SECONDS:
            return known[1]
        found = await self.read(run, lambda: describe_run(run))
        self._described[run.name] = now, found
        return found

    async def reading(self, name: str, episode_id: str) -> EpisodeReading:
        """Return an episode, from memory if nothing can have changed since it was read."""
        run, key = self.run(name), (name, episode_id)
        seen = run.seen
        if (known := self._readings.get(key)) is not None and (known[0] == seen or known[1].view.step is not None):
            self._readings.move_to_end(key)
            return known[1]
        found = await self.read(run, lambda: read_reading(run, episode_id))
        self._readings[key] = seen, found
        while len(self._readings) > READINGS:
            self._readings.popitem(last=False)
        return found
