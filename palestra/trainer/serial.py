"""One thing after another, each once: what every trainer needs around its work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
REMEMBERED = 64


class Serial:
    """Runs requests one at a time. A repeated request id waits for the first one and gets its answer."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()

    async def once(self, request_id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, unless this id has been seen. A caller that is cancelled does not stop it."""
        task = self._known.get(request_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(self._locked(work))
            self._known[request_id] = task
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        result: T = await asyncio.shield(task)
        return result

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            return await work()
