"""Notice that a client disconnects while its request is being answered, and cancel the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Scope

from palestra.http.protocol import CONNECTION

T = TypeVar("T")


async def until_disconnect(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects.

    Args:
        scope: of the request. One that `LimitedProtocol` has not received has no connection that could be lost.

    Raises:
        ClientDisconnect: the client disconnected before `work` was finished.
    """
    connection = scope.get(CONNECTION)
    if connection is None:
        return await work
    if connection.lost:
        work.close()
        raise ClientDisconnect
    caller = asyncio.current_task()
    assert caller is not None
    cancelled_before = caller.cancelling()
    connection.flow.resume_reading()  # uvicorn pauses it for a long body, and a paused socket does not say that it ends
    mine = connection.on_lost = caller.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if connection.lost and caller.uncancel() <= cancelled_before:
            raise ClientDisconnect from None
        raise
    finally:
        if connection.on_lost is mine:  # else of the next request on this connection
            connection.on_lost = None
