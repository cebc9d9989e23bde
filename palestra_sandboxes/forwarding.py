"""`Forwarder`: the way from a box without a network to the one server that it may reach."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit, urlunsplit

from palestra.errors import ConfigError

_FIRST_PORT = 1024  # below it, a program needs a right to listen
_OTHER_PORT = 8000
_MAX_CONNECTIONS = 64
_CHUNK = 65_536


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of a server's base URL.

    Raises:
        ConfigError: it is no URL of http.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the endpoint of a sandbox, {endpoint!r}, is no URL: {error}") from error
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"the endpoint of a sandbox is a URL of http, and not {endpoint!r}")
    return parts.hostname, port or 80


def inner_url(endpoint: str) -> str:
    """Return the URL at which programs in the box reach the server."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(netloc=f"127.0.0.1:{inner_port(endpoint)}"))


def inner_port(endpoint: str) -> int:
    """Return the port on which the box's own loopback address leads to the server."""
    _, port = address_of(endpoint)
    return port if port >= _FIRST_PORT else _OTHER_PORT


class Forwarder:
    """Passes connections to a listening socket, made in the box's network, on to a server outside."""

    def __init__(self, endpoint: str) -> None:
        self._address = address_of(endpoint)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Accept connections; the socket is closed with the forwarder. A forwarder that runs goes on with this one."""
        await self.close()
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listening)

    async def close(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in (tasks := list(self._open)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection, both ways, until both ends are closed."""
        try:
            there, back = await asyncio.open_connection(*self._address)
        except OSError:
            writer.close()  # the program sees that the server is away
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass(reader, back))
                group.create_task(_pass(there, writer))
        finally:
            writer.close()
            back.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what one end sends, and then its end."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if not writer.is_closing():
            writer.write_eof()
    except OSError:
        writer.close()  # one end is gone, so the other one is told
