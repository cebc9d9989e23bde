"""Run the requests to a trainer one after another, and each of them once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
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
            request_id: names the request; the newest 64 of each policy are remembered.
            work: the work to do.
        """
        if self._is_new(policy, request_id):
            self._remember(policy, request_id, asyncio.ensure_future(self._locked(work)))
        result: T = await asyncio.shield(self._known[policy, request_id])
        return result

    async def run_together(
        self, requests: Sequence[tuple[str, str]], work: Callable[[list[int]], Awaitable[list[T | Exception]]]
    ) -> list[T | Exception]:
        """Run several requests as one piece of work, but for those that have been seen.

        Args:
            requests: for each its policy and its id.
            work: is given the places of the requests that are new, and returns the result of each, or its error.

        Returns:
            The result of each request, or its error; one that failed may be repeated under its id.
        """
        # Kept here as well: of more requests than are remembered, the first are forgotten before the last has begun.
        tasks: dict[tuple[str, str], asyncio.Task[T]] = {
            request: self._known[request] for request in requests if not self._is_new(*request)
        }
        new = [n for n, request in enumerate(requests) if request not in tasks and request not in requests[:n]]
        if new:
            whole = asyncio.ensure_future(self._locked(lambda: work(new)))
            for number, place in enumerate(new):
                tasks[requests[place]] = asyncio.ensure_future(_part(whole, number))
                self._remember(*requests[place], tasks[requests[place]])
        known = [asyncio.shield(tasks[request]) for request in requests]
        found = list[T | Exception]()
        for one in await asyncio.gather(*known, return_exceptions=True):
            if isinstance(one, BaseException) and not isinstance(one, Exception):
                raise one
            found.append(one)
        return found

    def _is_new(self, policy: str, request_id: str) -> bool:
        """Whether a request has not been seen, or has failed."""
        task = self._known.get((policy, request_id))
        return task is None or (task.done() and (task.cancelled() or task.exception() is not None))

    def _remember(self, policy: str, request_id: str, task: asyncio.Task[Any]) -> None:
        self._known[policy, request_id] = task
        own = [key for key in self._known if key[0] == policy]
        for key in own[:-REMEMBERED]:
            del self._known[key]

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        for key in [key for key in self._known if key[0] == policy]:
            del self._known[key]

    async def _locked(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` while no other work of this object runs."""
        async with self._lock:
            return await work()


async def _part(whole: asyncio.Task[list[T | Exception]], number: int) -> T:
    """Return one result of several, or raise its error."""
    found = (await asyncio.shield(whole))[number]
    if isinstance(found, Exception):
        raise found
    return found
