"""Rollouts and weight updates exclude each other, without a thread or a poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

_HELD: ContextVar[tuple[RolloutSyncLock, ...]] = ContextVar("palestra_rollout_locks", default=())


class RolloutSyncLock:
    """Any number of rollouts at once, or one weight sync. A sync that waits is preferred to rollouts that begin.

    What a rollout starts while it holds the lock (subagents, tasks of its own) holds it with it: otherwise a sync that
    waits for the rollout, which waits for its subagent, which waits behind the sync, would wait for ever.
    """

    def __init__(self) -> None:
        self._rollouts = 0
        self._syncing = False
        self._syncs_waiting = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def acquire_rollout(self) -> AsyncIterator[None]:
        """Hold the lock with other rollouts."""
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
            self._rollouts -= 1  # without waiting for anything: a cancelled rollout must not keep its place
            self._wake()

    @asynccontextmanager
    async def acquire_weight_sync(self) -> AsyncIterator[None]:
        """Hold the lock alone, when the rollouts that hold it have ended.

        Raises:
            RuntimeError: asked for by a rollout that holds it; it would wait for itself.
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
