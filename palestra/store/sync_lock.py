"""A lock by which rollouts and weight updates exclude each other, wherever the rollouts are played."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palestra.database import WAKE_SECONDS, Notifier


class RolloutSyncLock:
    """A lock that any number of rollouts hold together, or weight syncs alone.

    A rollout holds it from its claim until its lease is over, in whatever process it is played. A waiting sync goes
    before new claims.

    Attributes:
        released: notified when a rollout has released the lock.
        reopened: notified when episodes can be claimed again.
    """

    def __init__(self, rollouts: Callable[[], int], reopened: Notifier) -> None:
        """Create the lock.

        Args:
            rollouts: returns how many rollouts hold it now.
        """
        self._rollouts, self.reopened, self.released = rollouts, reopened, Notifier()
        self._waiting = self._syncing = 0

    def refuses(self, episode_id: str | None) -> bool:
        """Return whether an episode can't be claimed now.

        A claim by name may be of an episode that a rollout plays inside its own, so a waiting sync waits for it too.

        Args:
            episode_id: of a claim by name; None: any episode.
        """
        return self._syncing > 0 or (self._waiting > 0 and episode_id is None)

    @asynccontextmanager
    async def acquire_weight_sync(self) -> AsyncIterator[None]:
        """Refuse claims for the time of the block, which begins once no rollout holds the lock."""
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
