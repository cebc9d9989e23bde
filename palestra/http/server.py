"""An HTTP server: a listening socket, and uvicorn with limits."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from palestra.errors import ConfigError
from palestra.http.connections import Connections, backlog
from palestra.http.protocol import LimitedProtocol, ServedWebSocket

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PONG_SECONDS = 60.0  # after which a client of a WebSocket that answers no ping is gone; uvicorn pings each 20 s


def listen(host: str, port: int, or_any: bool = False) -> socket.socket:
    """Return a listening socket. `port` 0 is any free port; `or_any`: use another port if
    this default is in use.
    """
    if not 0 <= port < 2**16:  # the system takes the remainder
        raise ConfigError(f"{port} is no port; set server.port to 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(
                backlog()
            )  # here already: two servers may be bound to one address until one of them listens
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if or_any and error.errno == errno.EADDRINUSE:
            return listen(host, 0)
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror or error}); set server.port, or 0 for any free port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of `listener` on this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def served(
    app: ASGIApp,
    listener: socket.socket,
    stop: Callable[[], None] = lambda: None,
    connections: Connections | None = None,
    websocket_bytes: int | None = None,
) -> AsyncIterator[None]:
    """Serve an application while the block is open.

    Args:
        listener: closed at the end.
        stop: called at the end, before the connections are closed.
        connections: counts and limits the connections; None: default limits.
        websocket_bytes: limit of a WebSocket message; None: there are no WebSockets.
    """
    known = Connections() if connections is None else connections
    known.fit_descriptors()
    settings = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, known),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none" if websocket_bytes is None else ServedWebSocket,
        ws_max_size=websocket_bytes or 0,
        ws_ping_timeout=PONG_SECONDS,
        ws_per_message_deflate=False,  # takes more time than it saves in a network of machines side by side
        log_config=None,
        log_level="error",  # clients can cause warnings without a key
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        backlog=backlog(),
        callback_notify=known.sweep,
        timeout_notify=0,  # each second
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # the job's owner decides what SIGINT means
    known.open = server.server_state.connections
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or task.done()):  # uvicorn has no event for its start
            await asyncio.wait((task,), timeout=0.01)
        yield
    finally:
        stop()
        server.should_exit = True
        await task


T = TypeVar("T")


def run_on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on the faster uvloop, for threads and processes that serve."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def tune_gc() -> None:
    """Make pauses of garbage collection short and those of all objects rare, for a process that only runs a job.

    A collection stops all threads for the time that it takes to examine its objects, and recorded calls are many small
    objects, hardly any in a cycle: so few are examined at a time, and hardly ever those that were found alive twice.
    """
    gc.freeze()  # objects of imported modules are not examined again
    gc.set_threshold(5_000, 1, 2_000)
