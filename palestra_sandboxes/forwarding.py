"""`Forwarder`: the way from a box without a network to the one server that it may reach."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from urllib.parse import urlsplit, urlunsplit

from palestra.errors import ConfigError

_FIRST_PORT = 1024  # below it, a program needs a right to listen
_OTHER_PORT = 8000
_MAX_CONNECTIONS = 64
_CHUNK = 65_536
_HEAD_BYTES = 65_536  # of a request's first line and headers


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


class Forwarder:
    """Passes connections to a listening socket, made in the box's network, on to a server outside.

    Attributes:
        port: of the box's own loopback address, on which the socket has to listen.
        url: at which programs in the box reach the server.
        stand_in: what programs in the box send as the key.
    """

    def __init__(self, endpoint: str, key: str | None) -> None:
        """Describe a server. `key`: replaces `stand_in` where a request has it as its key; None: nothing."""
        self._address, self._key = address_of(endpoint), key
        self.port = self._address[1] if self._address[1] >= _FIRST_PORT else _OTHER_PORT
        self.url = urlunsplit(urlsplit(endpoint)._replace(netloc=f"127.0.0.1:{self.port}"))
        self.stand_in = None if key is None else f"sandbox-{secrets.token_hex(16)}"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Accept connections; the socket is closed with the forwarder. A forwarder that runs goes on with this one."""
        await self.close()
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=_HEAD_BYTES)

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
            if self._key is not None and self.stand_in is not None:
                head = await reader.readuntil(b"\r\n\r\n")
                if re.search(rb"(?<!\r)\n|\r(?!\n)", head):  # a server may see the end of the head, and a body, there
                    return
                back.write(_with_key(head, self.stand_in, self._key))
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass(reader, back))
                group.create_task(_pass(there, writer))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return  # no request of HTTP, or the program has ended
        finally:
            writer.close()
            back.close()


def _with_key(head: bytes, stand_in: str, key: str) -> bytes:
    """Return the head of a request with the key; it becomes the last of its connection, of which one is looked at.

    The key replaces a whole credential only: a server may return other parts of a request, such as its path or host.
    """
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    credential = re.compile(rb"(?i:(authorization:[ \t]*bearer|x-api-key:)[ \t]*)" + stand_in.encode() + rb"[ \t]*")
    for number, line in enumerate(lines):
        if credential.fullmatch(line) is not None:
            lines[number] = line.replace(stand_in.encode(), key.encode())
    lines[1:1] = [b"Connection: close"]
    return b"\r\n".join(lines)


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
