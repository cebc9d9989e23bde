"""Many requests at a time share small pools of connections, over TCP and over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from palestra import http_clients
from palestra.http_clients import REQUESTS_OF_A_POOL, AsyncProxyRoutes, async_http_client

AT_A_TIME = 5 * REQUESTS_OF_A_POOL


class Connections:
    """A server that answers when so many requests wait, and counts its connections."""

    def __init__(self) -> None:
        self.opened, self._waiting, self._all = 0, 0, asyncio.Event()
        self.one_by_one, self.tasks = False, set[asyncio.Task[None] | None]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.opened += 1
        self.tasks.add(asyncio.current_task())
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            here, self._waiting = self._all, self._waiting + 1
            if self._waiting == AT_A_TIME or self.one_by_one:
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
        await asyncio.gather(*filter(None, seen.tasks))


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


async def test_answers_that_are_still_read_count_and_pools_that_nobody_needs_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(None) as (seen, url), async_http_client() as http:
        sent = (http.send(http.build_request("GET", url), stream=True) for _ in range(AT_A_TIME))
        answers = await asyncio.gather(*sent)
        routes = http._transport
        assert isinstance(routes, AsyncProxyRoutes)
        (pools,) = routes._pools.values()
        assert [pool.requests for pool in pools] == [REQUESTS_OF_A_POOL] * (AT_A_TIME // REQUESTS_OF_A_POOL)
        for answer in answers:
            assert await answer.aread() == b"ok"
            await answer.aclose()  # again
        assert [pool.requests for pool in pools] == [0] * len(pools)
        monkeypatch.setattr(http_clients, "IDLE_SECONDS", -1.0)
        seen.one_by_one = True
        for left in (4, 3, 2, 1, 1):
            assert (await http.get(url)).text == "ok"
            assert len(pools) == left
