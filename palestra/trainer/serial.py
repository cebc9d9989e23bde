"""Run the requests to a trainer one after another, and each of them once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
REMEMBERED = 64


class KnownRequests:
    """The newest 64 requests of each policy, by their ids."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], asyncio.Future[Any]] = OrderedDict()

    def find(self, policy: str, request_id: str) -> asyncio.Future[Any] | None:
        """Return the result of a request; None: it has not been seen, or has failed, so that it may be repeated.

        Args:
            policy: the policy of the request; each policy has request ids of its own.
            request_id: names the request.
        """
        found = self._known.get((policy, request_id))
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            return None
        return found

    def remember(self, policy: str, request_id: str, result: asyncio.Future[Any]) -> None:
        """Keep the result of a request.

        Args:
            policy: the policy of the request.
            request_id: names the request.
            result: is done when the request is.
        """
        self._known[policy, request_id] = result
        own = [key for key in self._known if key[0] == policy]
        for key in own[:-REMEMBERED]:
            del self._known[key]

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        for key in [key for key in self._known if key[0] == policy]:
            del self._known[key]


class Serial:
    """Runs pieces of work one at a time, in the order in which they were requested."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known = KnownRequests()

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
        known = self._known.find(policy, request_id)
        if known is None:
            known = asyncio.ensure_future(self._locked(work))
            self._known.remember(policy, request_id, known)
        result: T = await asyncio.shield(known)
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
        results = {request: known for request in requests if (known := self._known.find(*request)) is not None}
        new = [n for n, request in enumerate(requests) if request not in results and request not in requests[:n]]
        if new:
            whole = asyncio.ensure_future(self._locked(lambda: work(new)))
            for number, place in enumerate(new):
                results[requests[place]] = part = asyncio.ensure_future(_part(whole, number))
                self._known.remember(*requests[place], part)
        found = list[T | Exception]()
        shielded = [asyncio.shield(results[request]) for request in requests]
        for one in await asyncio.gather(*shielded, return_exceptions=True):
            if isinstance(one, BaseException) and not isinstance(one, Exception):
                raise one
            found.append(one)
        return found

    def forget(self, policy: str) -> None:
        """Forget the requests of a removed policy, so that a later policy of the same name starts without them."""
        self._known.forget(policy)

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
