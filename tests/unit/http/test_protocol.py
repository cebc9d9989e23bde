"""A client that goes away ends the work that it waited for, and nothing beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from palestra.http.app import build_app
from palestra.http.protocol import CONNECTION, until_disconnect
from palestra.http.server import listen, served
from palestra.types.wire import ErrorAnswer


class Connection:
    """A connection that `go` closes, as `LimitedProtocol` has it."""

    def __init__(self) -> None:
        self.lost = False
        self.flow = SimpleNamespace(resume_reading=lambda: None)
        self.on_lost: Callable[[], object] | None = None
        self.scope = {CONNECTION: self}

    def go(self) -> None:
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()


async def test_work_that_is_done_in_time_gives_its_result_and_the_watch_ends():
    before = asyncio.all_tasks()
    assert await until_disconnect(Connection().scope, asyncio.sleep(0.01, "done")) == "done"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_an_error_of_the_work_is_raised_as_it_is():
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await until_disconnect(Connection().scope, fail())


async def test_a_client_that_goes_cancels_the_work_and_leaves_the_task_usable():
    connection, ended = Connection(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # it may still have something to put in order
            ended.append("work")

    asyncio.get_running_loop().call_later(0.01, connection.go)
    with pytest.raises(ClientDisconnect):
        await until_disconnect(connection.scope, work())
    assert ended == ["work"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    async with asyncio.timeout(5):
        await asyncio.sleep(0.01)


async def test_work_that_ends_in_another_way_when_it_is_cancelled_says_how():
    connection = Connection()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("its own error") from None

    asyncio.get_running_loop().call_later(0.01, connection.go)
    with pytest.raises(KeyError):
        await until_disconnect(connection.scope, work())


async def test_a_caller_that_is_cancelled_is_cancelled_and_not_disconnected():
    task = asyncio.ensure_future(until_disconnect(Connection().scope, asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_goes_when_the_work_is_done_cancels_nothing():
    connection = Connection()

    async def work() -> str:
        asyncio.get_running_loop().call_soon(connection.go)
        return "done"

    assert await until_disconnect(connection.scope, work()) == "done"
    for _ in range(3):
        await asyncio.sleep(0)


async def test_work_for_a_client_that_has_gone_is_not_begun():
    connection, begun = Connection(), []
    connection.go()

    async def work() -> None:
        begun.append("work")

    with pytest.raises(ClientDisconnect):
        await until_disconnect(connection.scope, work())
    assert begun == []


async def test_the_watch_of_the_next_request_outlasts_the_one_before_it():
    connection = Connection()
    first = asyncio.create_task(until_disconnect(connection.scope, asyncio.sleep(0.02)))
    await asyncio.sleep(0)
    second = asyncio.create_task(until_disconnect(connection.scope, asyncio.sleep(60)))
    await first
    connection.go()
    with pytest.raises(ClientDisconnect):
        await second


@pytest.mark.parametrize("size", [1_000, 300_000])  # uvicorn stops reading a socket of which 64 KiB wait
async def test_a_server_notices_that_the_client_of_a_long_body_goes(size):
    began, ended = asyncio.Event(), asyncio.Event()

    async def authenticate(request: Request) -> int:
        return 1_000_000

    app = build_app("t", "t", authenticate, 1_000_000)

    async def work(request: Request) -> Response:
        began.set()
        try:
            await until_disconnect(request.scope, asyncio.sleep(60))
        finally:
            ended.set()
        return Response()

    app.add_direct("/work", work, ErrorAnswer)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with served(app, listener), asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()
        await began.wait()
        writer.close()
        await ended.wait()
