"""A condition variable of an event loop that cannot lose a notification."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

# How long a task waits before it reads the database again without a notification. A change that was committed without a
# notification, because the operation failed after its commit, is noticed at most so much later.
WAKE_SECONDS = 5.0


class Notifier:
    """Wakes tasks that wait for a change of the database.

    Read `count`, query the database, then pass `count` to `wait`, which returns immediately if there was a notification
    in between.

    Attributes:
        count: number of notifications so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # first come, first served

    async def wait(self, timeout_seconds: float, since: int) -> None:
        """Return at the next notification, or after the timeout. `since`: `count` before the caller's query; returns
        immediately if it has changed.
        """
        if self.count != since:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.notify(1)  # pass the wake-up on: a task that is cancelled does not act on it
            raise
        finally:
            self._waiting.pop(future, None)

    def notify(self, times: int | None = None) -> None:
        """Wake the `times` tasks that have waited longest; None: all tasks."""
        left = len(self._waiting) if times is None else times
        self.count += 1
        while left > 0 and self._waiting:
            future, _ = self._waiting.popitem(last=False)
            if not future.done():
                future.set_result(None)
                left -= 1
