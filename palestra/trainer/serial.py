"""One thing after another, and each request once: what every trainer needs around its work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
REMEMBERED = 64


class Serial:
    """Runs work one piece at a time, in the order in which it was asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after all that was asked for before. A caller that is cancelled does not stop it."""
        return await asyncio.shield(asyncio.ensure_future(self._locked(work)))

    async def run_idempotent(self, policy: str, request_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` unless this request has been seen: then wait for the first run, and return its answer.

        A run that failed may be tried again under its id. A caller that is cancelled does not stop it.

        Args:
            policy: what the request is about; other policies have ids of their own.
            request_id: names the request; the newest 64 of all policies are remembered.
            work: what to do.
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
        """Forget the requests of a policy: one of the same name that comes later is another policy."""
        for key in [key for key in self._known if key[0] == policy]:
            del self._known[key]

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            return await work()
