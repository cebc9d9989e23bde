"""What a pool and the keeper of its workers both know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from palestra.engine.pool.wanted import WantedPolicy
from palestra.errors import EngineFailure, PalestraError

log = logging.getLogger("palestra.engine")
MOST_NEWS = 100  # lines about workers that are kept until they are read


class PoolState:
    """What all workers of a pool are to have, and what has become of the pool.

    Attributes:
        wanted: policies that every worker has to have beside those of its start, by name.
        paused: whether no worker may begin a forward pass.
        closed: whether the pool was closed.
        changed: is notified of workers that begin or cease to serve.
        failure: done with the reason when the pool as a whole has failed.
        news: lines for those who run the job.
    """

    def __init__(self) -> None:
        """Begin with an open pool without workers, on the event loop that runs."""
        self.wanted: dict[str, WantedPolicy] = {}
        self.paused = self.closed = False
        self.changed = asyncio.Condition()
        self.failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()
        self.news: asyncio.Queue[str] = asyncio.Queue(MOST_NEWS)

    def tell(self, text: str) -> None:
        """Keep a line for those who run the job; see `next_loss`. The oldest of many is dropped."""
        log.info("%s", text)
        if self.news.full():
            self.news.get_nowait()
        self.news.put_nowait(text)

    def fail(self, error: PalestraError) -> None:
        """Let the pool as a whole fail; the first reason counts."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def notify(self) -> None:
        """Wake those who wait for a worker, or for a change of the pool."""
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition of the pool's workers holds, or the pool was closed."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.closed or condition())

    def check_open(self) -> None:
        """Raise the error of a pool that was closed, or has failed."""
        if self.closed:
            raise EngineFailure("the engine was stopped")
        if self.failure.done():
            raise self.failure.result()
