"""An HTTP server: where it listens, and how it accepts connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

import uvicorn
from fastapi import FastAPI

from palestra.errors import ConfigError
from palestra.http.connections import Connections
from palestra.http.protocol import LimitedProtocol, refusal
from palestra.waiting import cancelled

BACKLOG = 4096
NO_DESCRIPTOR_SECONDS = 0.05  # between two attempts to accept a connection where no descriptor is free


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the address is in use, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # until one of them listens, two servers can be bound to the same address
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror or error}); set server.port, or 0 for any free port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL under which `listener` is reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def served(
    app: FastAPI,
    listener: socket.socket,
    stop: Callable[[], None] = lambda: None,
    connections: Connections | None = None,
) -> AsyncIterator[None]:
    """Serve an application.

    Args:
        app: the application.
        listener: a socket that listens; it is closed at the end.
        stop: called before the connections are closed.
        connections: counts and limits them. None: with the default limits.
    """
    known = Connections() if connections is None else connections
    known.fit_descriptors()
    settings = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(settings, known)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or task.done()):  # uvicorn has no event for it
            await asyncio.wait((task,), timeout=0.01)
        yield
    finally:
        stop()
        server.exit()
        await task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (the job's owner decides what SIGINT means), and with limits on connections.

    It accepts connections itself, one after another: the event loop would accept all that wait before the first of
    them could be counted. It looks at the clock once a second, not ten times: where a hundred jobs wait on one machine
    that is a part of its load.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []
        self._exit = asyncio.Event()

    def exit(self) -> None:
        """Close connections and return from `serve`."""
        self.should_exit = True
        self._exit.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self.servers = []  # of asyncio's there is none
        for listener in sockets or ():
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and close what is open."""
        try:
            await cancelled(*self._accepting)
        finally:
            await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is free, or the client has gone again
                self._connections.counts["not_accepted"] += 1
                await asyncio.sleep(NO_DESCRIPTOR_SECONDS)
                continue
            if self._connections.make_room():
                with contextlib.suppress(OSError):  # it has gone again
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.connect_accepted_socket(self._protocol, client)
            else:
                _refuse(client)

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self._connections, self.config, self.server_state, {})

    async def main_loop(self) -> None:
        """Until `exit`."""
        ticks = count(0, 10)  # uvicorn counts tenths of a second, and renews the header `date` at every tenth of them
        while not await self.on_tick(next(ticks)):
            self._connections.sweep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _refuse(client: socket.socket) -> None:
    """Answer a client that all connections are in use, and close its connection."""
    with contextlib.suppress(OSError):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.recv(65_536)  # what is unread when it is closed would make the kernel take back the answer
        client.send(refusal(503, "all connections of this server are in use; try again soon"))
    client.close()
