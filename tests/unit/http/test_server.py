"""A real server on a port, with small limits: what it does with clients that connect and do not behave."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx2
import pytest
import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from palestra.errors import ConfigError, Unauthorized
from palestra.http import guard
from palestra.http.app import build_app
from palestra.http.connections import ConnectionLimits, Connections
from palestra.http.server import listen, served, url_of

KEY = {"authorization": "Bearer good"}


def app_of(wait: asyncio.Event) -> FastAPI:
    async def authenticate(request: Request) -> int:
        if request.headers.get("authorization") != "Bearer good":
            raise Unauthorized("no good key")
        return 10_000

    app = build_app("t", "t", authenticate, 1_000_000)

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.get("/wait")
    async def wait_for_it() -> str:
        await wait.wait()
        return "done"

    @app.get("/big")
    async def big() -> Response:
        return Response(b"x" * 50_000_000)

    return app


class Server:
    def __init__(self, url: str, connections: Connections, go: asyncio.Event) -> None:
        self.url, self.connections, self.go = url, connections, go
        self.port = int(url.rpartition(":")[2])
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """What a connection is answered that sends `data` and then nothing."""
        reader, writer = await self.open()
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()


@asynccontextmanager
async def running(**limits):
    go = asyncio.Event()
    connections = Connections(ConnectionLimits(**limits))
    listener = listen("127.0.0.1", 0)
    async with served(app_of(go), listener, go.set, connections):
        server = Server(url_of(listener), connections, go)
        yield server
        for writer in server.writers:
            writer.close()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionResetError:
        return True


async def test_idle_connections_make_room_the_first_that_came_first():
    async with running(connections=16) as server:
        idle = [await server.open() for _ in range(40)]
        await until(lambda: server.connections.counts["accepted"] == 40)
        assert len(server.connections) == 16
        assert all([await ended(reader) for reader, _ in idle[:24]])
        assert not any(reader.at_eof() for reader, _ in idle[24:])
        async with httpx2.AsyncClient(base_url=server.url, headers=KEY) as http:
            assert (await http.post("/echo", content=b"abc")).json() == 3
        assert server.connections.counts["refused"] == 0


async def test_a_connection_with_a_good_key_outlives_any_number_without():
    async with running(connections=16) as server, httpx2.AsyncClient(base_url=server.url, headers=KEY) as http:
        await http.post("/echo", content=b"abc")
        keyless = httpx2.AsyncClient(base_url=server.url)
        for _ in range(60):
            await server.open()
            assert (await keyless.post("/echo", content=b"x")).status_code == 401
        await until(lambda: server.connections.counts["accepted"] >= 62)
        before = server.connections.counts["accepted"]
        assert (await http.post("/echo", content=b"abcd")).json() == 4
        assert server.connections.counts["accepted"] == before, "over the connection of before"
        await keyless.aclose()


async def test_where_all_connections_are_in_use_new_ones_are_refused_and_told_when():
    async with (
        running(connections=16) as server,
        httpx2.AsyncClient(base_url=server.url, headers=KEY, timeout=30) as http,
    ):
        waiting = [asyncio.ensure_future(http.get("/wait")) for _ in range(16)]
        await until(lambda: server.connections.in_use == 16)
        answer = await server.say(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert {b"retry-after: 1", b"connection: close"} <= set(answer.split(b"\r\n"))
        server.go.set()
        assert {(await answer).status_code for answer in waiting} == {200}
        assert (await http.post("/echo", content=b"abc")).json() == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [b"", b"GE", b"GET /wait HTTP/1.1\r\nhost: x\r\n", b"GET /wait HTTP/1.1\r\nauthorization: Bea"]
)
async def test_headers_have_a_deadline(part):
    async with running(header_seconds=0.2) as server:
        answer = await server.say(part)
        if b"\r\n" in part:
            assert answer.startswith(b"HTTP/1.1 408 ")
        await until(lambda: len(server.connections) == 0)
        assert server.connections.counts["headers_late"] == 1


@pytest.mark.slow
async def test_headers_that_come_byte_by_byte_have_the_same_deadline():
    async with running(header_seconds=0.3) as server:
        reader, writer = await server.open()
        writer.write(b"GET /wait HTTP/1.1\r\na: ")
        async with asyncio.timeout(20):
            while not reader.at_eof() and reader.exception() is None:
                writer.write(b"b")
                await asyncio.sleep(0.02)
        assert server.connections.counts["headers_late"] == 1


@pytest.mark.slow
async def test_what_follows_a_refusal_has_a_deadline():
    """The rest of a body that nobody reads is thrown away, but not for ever."""
    async with running(header_seconds=0.3) as server:
        reader, writer = await server.open()
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\nabc")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 401 ")
        for _ in range(200):
            if reader.at_eof() or writer.is_closing():
                break
            writer.write(b"x")
            await asyncio.sleep(0.02)
        await until(lambda: len(server.connections) == 0)


@pytest.mark.slow
async def test_an_idle_connection_is_closed_after_a_while():
    async with running(idle_seconds=0.2) as server:
        reader, writer = await server.open()
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\ncontent-length: 1\r\n\r\na")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: len(server.connections) == 0)
        assert server.connections.counts["idle_too_long"] == 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /wait HTTP/1.1\r\nx: " + b"a" * 300_000,
        b"GET /wait HTTP/1.1\r\nx: " + b"a" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 300_000,
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /wait HTTP/1.1\r\n" + b"".join(b"x%d: 1\r\n" % k for k in range(300)) + b"\r\n",
    ],
    ids=["open header", "header", "open path", "path", "many headers"],
)
async def test_heads_of_requests_have_a_size(head):
    async with running(header_bytes=8_000) as server:
        try:
            answer = await server.say(head)
        except ConnectionResetError:  # the kernel's, where the answer comes while more is being sent
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        await until(lambda: len(server.connections) == 0)
        assert server.connections.counts["headers_too_large"] == 1


async def test_trailers_are_limited_like_headers_and_chunks_are_not():
    async with running(header_bytes=8_000) as server:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await server.open()
        for _ in range(9):
            writer.write(head + b"3e8\r\n" + b"a" * 1000 + b"\r\n0\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"1000"), 20)).startswith(b"HTTP/1.1 200 ")
        writer.write(head + b"1\r\na\r\n0\r\n")
        for _ in range(50):
            if reader.at_eof():
                break
            writer.write(b"x: " + b"a" * 1000 + b"\r\n")
            await asyncio.sleep(0.01)
        assert server.connections.counts["headers_too_large"] == 1


async def test_a_body_is_only_asked_for_when_the_key_is_good():
    async with running() as server:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n"
        for key, first in ((b"", b"HTTP/1.1 401 "), (b"authorization: Bearer good\r\n", b"HTTP/1.1 100 ")):
            reader, writer = await server.open()
            writer.write(head + key + b"\r\n")
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(first)


REFUSED = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"  # it has no key, so its body is not waited for
ALLOWED = b"POST /echo HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\ncontent-length: 3\r\n\r\nabc"


async def refused_early(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which a request was refused of which the body has not come."""
    reader, writer = await server.open()
    writer.write(REFUSED)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return reader, writer


@pytest.mark.slow
async def test_a_connection_is_idle_when_the_body_of_a_refused_request_has_come():
    async with running(header_seconds=1, idle_seconds=60) as server:
        reader, writer = await refused_early(server)
        writer.write(b"body")
        await asyncio.sleep(3)  # the connections are looked at once a second
        writer.write(ALLOWED)
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert server.connections.counts["headers_late"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest", [b"", b"bo", b"bodyPOST /echo HTT"], ids=["nothing", "a part", "half a head behind it"]
)
async def test_what_is_due_after_a_refused_request_has_the_deadline_of_headers(rest):
    async with running(header_seconds=0.3, idle_seconds=60) as server:
        reader, writer = await refused_early(server)
        writer.write(rest)
        async with asyncio.timeout(10):
            answer = b""
            with suppress(ConnectionResetError):
                answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") == (b"POST" in rest)
        assert server.connections.counts["headers_late"] == 1


async def test_a_body_that_comes_byte_by_byte_has_a_deadline_of_its_own(monkeypatch):
    monkeypatch.setattr(guard, "WHOLE_BODY_SECONDS", 0.3)
    async with running() as server:
        reader, writer = await server.open()
        writer.write(ALLOWED.replace(b"content-length: 3", b"content-length: 9000"))
        answer = asyncio.ensure_future(reader.readuntil(b"}"))
        async with asyncio.timeout(10):
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
        assert b"the body had not come to its end after 0.3 s" in await answer


@pytest.mark.slow
@pytest.mark.parametrize("again", [b"", b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["one request", "and another"])
async def test_a_client_that_takes_no_answer_is_closed(again):
    async with running(stalled_seconds=0.3, header_seconds=1.0) as server:
        _, writer = await server.open()
        writer.transport.pause_reading()
        writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(again)
        await until(lambda: server.connections.counts["accepted"] == 1 and len(server.connections) == 0)
        assert server.connections.counts["answer_not_taken"] == 1


async def test_a_request_behind_a_refused_head_is_not_answered():
    async with running(header_bytes=200) as server:
        answer = await server.say(b"GET /wait HTTP/1.1\r\nx: " + b"a" * 300 + b"\r\n\r\n" + ALLOWED)
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_client_that_goes_with_requests_behind_the_one_that_runs_leaves_no_error_in_the_log(caplog):
    async def play() -> None:
        async with running() as server:
            for count in (2, 3, 20):  # the last is over the limit of waiting requests
                _, writer = await server.open()
                writer.write((b"GET /wait HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\n\r\n") * count)
                await asyncio.sleep(0.05)
                writer.transport.abort()
            await asyncio.sleep(0.05)
            server.go.set()
            await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `palestra` does
        runner.run(play())
    assert not caplog.records


@pytest.mark.parametrize("port", [65_536, 99_999, -1])
def test_a_number_that_is_no_port_is_refused_and_not_wrapped(port):
    with pytest.raises(ConfigError, match=rf"{port}.*port"):
        listen("127.0.0.1", port)
