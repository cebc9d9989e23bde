"""An HTTP server: the socket on which it listens, and how it accepts connections."""

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
from palestra.http.protocol import CountedWebSocket, LimitedProtocol, refusal
from palestra.waiting import cancelled

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 4096
PONG_SECONDS = 60.0  # after which a client of a WebSocket that answers no ping is gone; uvicorn pings each 20 s
NO_DESCRIPTOR_SECONDS = 0.05  # pause before the next attempt to accept a connection if no descriptor was free


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        port: 0: any free port.

    Raises:
        ConfigError: the address is in use, or is not one of this machine's.
    """
    if not 0 <= port < 2**16:  # the system takes the remainder
        raise ConfigError(f"{port} is no port; set server.port to 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # here already: two servers may be bound to one address until one of them listens
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror or error}); set server.port, or 0 for any free port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL at which `listener` can be reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def served(
    app: FastAPI,
    listener: socket.socket,
    stop: Callable[[], None] = lambda: None,
    connections: Connections | None = None,
    websocket_bytes: int | None = None,
) -> AsyncIterator[None]:
    """Serve an application inside of the block.

    Args:
        listener: a socket that listens; it is closed at the end.
        stop: called at the end, before the connections are closed.
        connections: counts and limits the connections; None: with the default limits.
        websocket_bytes: the longest message of a WebSocket; None: the application has no WebSocket.
    """
    known = Connections() if connections is None else connections
    known.fit_descriptors()
    settings = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none" if websocket_bytes is None else CountedWebSocket,
        ws_max_size=websocket_bytes or 0,
        ws_ping_timeout=PONG_SECONDS,
        ws_per_message_deflate=False,  # takes more time than it saves in a network of machines side by side
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
        while not (server.started or task.done()):  # uvicorn has no event for its start
            await asyncio.wait((task,), timeout=0.01)
        yield
    finally:
        stop()
        server.exit()
        await task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (the job's owner decides what SIGINT means), and with limits on connections.

    It accepts connections itself, one after another, because the event loop would accept all that wait before the first
    of them could be counted. Its clock ticks once a second and not ten times, which saves a part of the load where a
    hundred jobs wait on one machine.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []
        self._exit = asyncio.Event()

    def exit(self) -> None:
        """Close the connections and make `serve` return."""
        self.should_exit = True
        self._exit.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections on the sockets (called by uvicorn)."""
        self.servers = []  # uvicorn closes these asyncio servers at the end; there are none
        for listener in sockets or ():
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and close the open ones (called by uvicorn)."""
        try:
            await cancelled(*self._accepting)
        finally:
            await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections as long as there is room, and refuse the others with 503."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is free, or the client has disconnected again
                self._connections.counts["not_accepted"] += 1
                await asyncio.sleep(NO_DESCRIPTOR_SECONDS)
                continue
            if self._connections.make_room():
                with contextlib.suppress(OSError):  # the client has disconnected again
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.connect_accepted_socket(self._protocol, client)
            else:
                _refuse(client)

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self._connections, self.config, self.server_state, {})

    async def main_loop(self) -> None:
        """Sweep the connections once a second until `exit` is called."""
        ticks = count(0, 10)  # uvicorn counts tenths of a second, and renews the header `date` at each tenth tick
        while not await self.on_tick(next(ticks)):
            self._connections.sweep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers; see the class."""
        yield


def _refuse(client: socket.socket) -> None:
    """Answer a client that all connections are in use, and close its connection."""
    with contextlib.suppress(OSError):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.recv(65_536)  # if the socket were closed with unread bytes, the kernel would drop the answer
        client.send(refusal(503, "all connections of this server are in use; try again soon"))
    client.close()
