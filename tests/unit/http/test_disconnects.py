"""A client that goes away ends the work that it waited for, and nothing beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect

from palestra.http.disconnects import until_disconnect
from palestra.http.protocol import CONNECTION


class Connection:
    """A connection that `go` closes, as `LimitedProtocol` has it."""

    def __init__(self) -> None:
        self.lost = False
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
