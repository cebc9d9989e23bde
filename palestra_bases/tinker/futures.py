"""Waits for results of requests, for clients that ask for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from palestra_bases.tinker.journal import Completion, Journal
from palestra_bases.tinker.records import FutureRequest
from palestra_bases.tinker.tables import PENDING


class Futures:
    """Notifies waiting callers when a request has a result."""

    def __init__(self, journal: Journal) -> None:
        """Begin without waiting callers."""
        self._journal = journal
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def settled(self, name: str) -> None:
        """Wake callers that wait for a finished request, or for any of a sampler."""
        for waiter in self._waiting.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def result(self, tenant: str, request_id: str, seconds: float) -> FutureRequest:
        """Return a request with its result, or without one after a timeout."""
        with self._waiter(request_id) as waiter:
            found = await self._journal.request(tenant, request_id)
            if found.state != PENDING:
                return found
            await _wait(waiter, seconds)
            return await self._journal.request(tenant, request_id)

    async def completions(self, sampler_id: str, clone: int, after: int, seconds: float) -> list[Completion]:
        """Return a sampler's requests with results, waiting for a new one; see `Journal.completions`.

        Args:
            after: position of the last one known to the client.
        """
        with self._waiter(sampler_id) as waiter:
            if found := await self._journal.completions(sampler_id, clone, after):
                return found
            await _wait(waiter, seconds)
        return await self._journal.completions(sampler_id, clone, after)

    @contextlib.contextmanager
    def _waiter(self, name: str) -> Iterator[asyncio.Future[None]]:
        """Yield a future that `settled` sets; created before reading, so that no result in between is missed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(waiter)
        try:
            yield waiter
        finally:
            known = self._waiting.get(name)
            if known is not None:
                known.discard(waiter)
                if not known:
                    del self._waiting[name]


async def _wait(waiter: asyncio.Future[None], seconds: float) -> None:
    """Return when a future is set, or after some time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiter
