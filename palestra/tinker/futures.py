"""Waits for results of requests, for clients that ask for them."""

from __future__ import annotations

import asyncio
import contextlib

from palestra.tinker.journal import Journal
from palestra.tinker.records import Request
from palestra.tinker.tables import PENDING


class Futures:
    """Tells those who wait for a request when it has a result."""

    def __init__(self, journal: Journal) -> None:
        """Wait for nothing yet.

        Args:
            journal: has the results.
        """
        self._journal = journal
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def settled(self, request_id: str) -> None:
        """Wake those who wait for a request, which has a result on the disk now."""
        for waiter in self._waiting.pop(request_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def result(self, tenant: str, request_id: str, seconds: float) -> Request:
        """Return a request with its result, or without one if there is none after some time.

        Args:
            tenant: whose request it is.
            request_id: of the request.
            seconds: how long to wait.

        Raises:
            NotFound: the tenant has no such request.
        """
        # Waiting begins before the look, so that a result which comes between the two is not missed.
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(waiter)
        try:
            found = await self._journal.request(tenant, request_id)
            if found.state != PENDING:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter
            return await self._journal.request(tenant, request_id)
        finally:
            known = self._waiting.get(request_id)
            if known is not None:
                known.discard(waiter)
                if not known:
                    del self._waiting[request_id]
