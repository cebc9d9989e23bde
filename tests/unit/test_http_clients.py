"""Many requests at a time share small pools of connections, over TCP and over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from palestra.http_clients import REQUESTS_OF_A_POOL, AsyncProxyRoutes, async_http_client

AT_A_TIME = 5 * REQUESTS_OF_A_POOL


class Connections:
    """A server that answers when so many requests wait, and counts its connections."""

    def __init__(self) -> None:
        self.opened, self._waiting, self._all = 0, 0, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.opened += 1
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            here, self._waiting = self._all, self._waiting + 1
            if self._waiting == AT_A_TIME:
                self.answer()
            await here.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    def answer(self) -> None:
        """Answer all that wait."""
        self._all.set()
        self._waiting, self._all = 0, asyncio.Event()


@asynccontextmanager
async def serving(path: Path | None) -> AsyncIterator[tuple[Connections, str]]:
    """Serve at a Unix socket or a port; yield the server and its URL."""
    seen = Connections()
    if path is None:
        server = await asyncio.start_server(seen.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    else:
        server = await asyncio.start_unix_server(seen.serve, path)
        url = "http://engine/"
    async with server:
        yield seen, url
        seen.answer()


@pytest.mark.parametrize("kind", ["port", "socket"])
async def test_requests_at_a_time_have_a_connection_each_in_pools_of_few_which_they_use_again(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "s" if kind == "socket" else None
    async with serving(path) as (seen, url), async_http_client(socket=None if path is None else str(path)) as http:
        for _ in range(3):
            answers = await asyncio.gather(*(http.get(url) for _ in range(AT_A_TIME)))
            assert {answer.text for answer in answers} == {"ok"}
        routes = http._transport
        assert isinstance(routes, AsyncProxyRoutes)
        (pools,) = routes._pools.values()
        assert len(pools) == AT_A_TIME / REQUESTS_OF_A_POOL
        assert [pool.requests for pool in pools] == [0] * len(pools)
        assert seen.opened == AT_A_TIME


async def test_a_request_that_fails_or_is_cancelled_leaves_its_place() -> None:
    async with serving(None) as (_, url), async_http_client() as http:
        waiting = asyncio.create_task(http.get(url))  # has no answer before others come
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(httpx2.ConnectError):
            await http.get("http://127.0.0.1:1/")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        routes = http._transport
        assert isinstance(routes, AsyncProxyRoutes)
        assert [pool.requests for pools in routes._pools.values() for pool in pools] == [0]
