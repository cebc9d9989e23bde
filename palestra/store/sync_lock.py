"""A lock that excludes rollouts and weight updates from each other, in all processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palestra.database import WAKE_SECONDS, Notifier


class RolloutSyncLock:
    """A lock that rollouts share, and weight syncs hold alone.

    A rollout in any process holds it from its claim until the end of its lease. A waiting sync takes precedence over
    new claims.

    Attributes:
        released: notified when a rollout has released the lock.
        reopened: notified when episodes can be claimed again.
    """

    def __init__(self, rollouts: Callable[[], int], reopened: Notifier) -> None:
        self._rollouts, self.reopened, self.released = rollouts, reopened, Notifier()
        self._waiting = self._syncing = 0

    def refuses(self, episode_id: str | None) -> bool:
        """Return whether an episode cannot be claimed now.

        Claims by name are still allowed while a sync waits, because a rollout may play such an episode inside its own.
        """
        return self._syncing > 0 or (self._waiting > 0 and episode_id is None)

    @asynccontextmanager
    async def acquire_weight_sync(self) -> AsyncIterator[None]:
        """Refuse claims inside the block, which begins once no rollout holds the lock."""
        self._waiting += 1
        try:
            while self._rollouts():
                await self.released.wait(WAKE_SECONDS, self.released.count)
            self._syncing += 1
            try:
                yield
            finally:
                self._syncing -= 1
        finally:
            self._waiting -= 1
            self.reopened.notify()
