"""A lock by which rollouts and weight updates exclude each other, for one event loop: no threads, no polling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

_HELD: ContextVar[tuple[RolloutSyncLock, ...]] = ContextVar("palestra_rollout_locks", default=())


class RolloutSyncLock:
    """A lock that any number of rollouts hold together, or one weight sync alone.

    A waiting sync goes before new rollouts.

    Tasks that a rollout starts while it holds the lock (subagents, for instance) hold it too. Otherwise a sync would
    wait for the rollout, the rollout for its subagent, and the subagent for the sync: a deadlock.
    """

    def __init__(self) -> None:
        self._rollouts = 0
        self._syncing = False
        self._syncs_waiting = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def acquire_rollout(self) -> AsyncIterator[None]:
        """Hold the lock, together with other rollouts, for the time of the block."""
        held = _HELD.get()
        if self in held:
            yield
            return
        await self._until(lambda: not self._syncing and not self._syncs_waiting)
        self._rollouts += 1
        token = _HELD.set((*held, self))
        try:
            yield
        finally:
            _HELD.reset(token)
            self._rollouts -= 1  # no `await` before this line: a cancelled rollout must release the lock
            self._wake()

    @asynccontextmanager
    async def acquire_weight_sync(self) -> AsyncIterator[None]:
        """Hold the lock alone for the time of the block, once the rollouts that hold it have ended.

        Raises:
            RuntimeError: the caller is a rollout that holds the lock, and would wait for itself.
        """
        if self in _HELD.get():
            raise RuntimeError("a rollout that holds the lock can't wait until no rollout holds it")
        self._syncs_waiting += 1
        try:
            await self._until(lambda: not self._syncing and not self._rollouts)
            self._syncing = True
        finally:
            self._syncs_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._syncing = False
            self._wake()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
