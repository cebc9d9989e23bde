"""Notice that a client disconnects while its request is being answered, and cancel the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it if the client disconnects.

    Args:
        receive: of a request whose body has been read.
    """
    # `work` runs in the caller's task, and the watch cancels that task, as `asyncio.timeout` does. A race of two tasks
    # would cost every model call a second task.
    caller = asyncio.current_task()
    assert caller is not None
    cancelled_before, waiting = caller.cancelling(), True

    def cancel(watch: asyncio.Future[None]) -> None:
        if waiting and not watch.cancelled():
            caller.cancel()

    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        gone = watch.done() and not watch.cancelled()
        if gone and caller.uncancel() <= cancelled_before:
            raise ClientDisconnect from None
        raise
    finally:
        waiting = False
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    """Return when the client disconnects; other messages of the request are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
