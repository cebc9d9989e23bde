"""Run the requests to a trainer one after another, and each of them once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
REMEMBERED = 64


class Serial:
    """Runs pieces of work one at a time, in the order in which they were requested."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after all work that was requested earlier, and return its result.

        Cancelling the caller does not stop the work.
        """
        return await asyncio.shield(asyncio.ensure_future(self._locked(work)))

    async def run_idempotent(self, policy: str, request_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` unless this request has been seen; then wait for the first run and return its result.

        A run that failed may be repeated under its id. Cancelling the caller does not stop the work.

        Args:
            policy: the policy of the request; each policy has request ids of its own.
            request_id: names the request; the newest 64 of all policies are remembered.
            work: the work to do.
        """
        key = (policy, request_id)
        task = self._known.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(self._locked(work))
            self._known[key] = task
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        result: T = await asyncio.shield(task)
        return result

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        for key in [key for key in self._known if key[0] == policy]:
            del self._known[key]

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` while no other work of this object runs."""
        async with self._lock:
            return await work()
