"""What a job and its base server send each other: messages of `palestra.process.channel` over WebSockets.

The first of a job is `Hello`, which the server answers with the event `welcome`. Then the job calls methods of
`Engine`, `Trainer` and `BaseCalls`. An event `version` of the server says which version the trainer has of a policy,
and `refused` why the connection ends. With its connection the server forgets a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from palestra.engine import remote_weights as _weights  # noqa: F401 - how they are sent
from palestra.engine.base import Engine
from palestra.errors import InvalidRequest, PalestraError
from palestra.process.channel import Event, Message, raw
from palestra.process.codec import SentError, decode, encode
from palestra.threads import in_thread
from palestra.trainer.base import Trainer
from palestra_bases.base import BaseDescription, SamplerSpec

PROTOCOL = 3  # grows with every change of the messages
MOST_BYTES = 256 * 2**20  # of a message
MOST_VALUES = 2_000_000  # of a message; each row of a batch has some 100
MOST_DUE = 1024  # messages that wait for the connection before nothing more is taken from it, and replies wait
MOST_TOGETHER = 64  # messages that are sent in one, unless fewer have
MOST_BYTES_TOGETHER = 2**20
TAKEN_OVER = 4001  # the code with which a connection is closed when another process of the job has connected
REFUSED = 4002  # and when its message could not be used, after the event with the reason
# What follows the first byte of a value in msgpack: how many bytes its length has; how many more bytes there are, or,
# where it has no length, how many bytes or values; and how many values stand for one that is counted.
_LAYOUT: list[tuple[int, int, int]] = (
    [(0, 0, 0)] * 0x80
    + [(0, count, 2) for count in range(16)]
    + [(0, count, 1) for count in range(16)]
    + [(0, count, 0) for count in range(32)]
    + [(0, 0, 0)] * 4
    + [(length, extra, 0) for extra in (0, 1) for length in (1, 2, 4)]
    + [(0, extra, 0) for extra in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17)]
    + [(length, 0, 0) for length in (1, 2, 4)]
    + [(length, 0, each) for each in (1, 2) for length in (2, 4)]
    + [(0, 0, 0)] * 0x20
)


class Hello(msgspec.Struct):
    """Who connects."""

    protocol: int
    job: str


class BaseCalls(Protocol):
    """A job's calls besides the methods of the engine and the trainer."""

    async def describe(self) -> BaseDescription:
        """Return what a job has to know of the model."""
        ...

    async def sample(self, policy: str, spec: SamplerSpec) -> None:
        """Add one of the job's policies to the engine. Raises ConfigError: another base, or an unfit adapter."""
        ...


PARTS: dict[str, Any] = {"base": BaseCalls, "engine": Engine, "trainer": Trainer}


def pack_messages(*messages: Message) -> bytes:
    """Return the bytes of messages."""
    return encode(messages)


def unpack_messages(data: str | bytes) -> list[Message]:
    """Return the messages of `pack_messages`. Raises InvalidRequest if they are none, or too long."""
    if isinstance(data, str):
        raise InvalidRequest("a message of this protocol is bytes, and not text")
    check_values(data, MOST_VALUES)
    found: list[Message] = decode(list[Message], data)
    return found


def check_values(data: bytes, most: int) -> None:
    """Refuse bytes that would become too many values, before any of them is made. Raises InvalidRequest: there are more
    than `most` texts, numbers, lists, …, or the bytes are no values.
    """
    if len(data) <= most:  # each has a byte or more
        return
    at, left, found = 0, 1, 0
    while left:
        found, left = found + 1, left - 1
        if found > most or left >= len(data) - at:
            raise InvalidRequest(f"a message has at most {most:,} values")
        length, extra, each = _LAYOUT[data[at]]
        at += 1 + length
        if length:
            size = int.from_bytes(data[at - length : at], "big")
            at, left = (at, left + size * each) if each else (at + size + extra, left)
        elif extra:
            at, left = (at, left + extra * each) if each else (at + extra, left)
    if at != len(data):
        raise InvalidRequest("no such message: its values do not fill its bytes")


def first(data: str | bytes, name: str, kind: Any) -> Any:
    """Return the value of the event with which a connection begins. Raises InvalidRequest if it is something else."""
    match unpack_messages(data):
        case [Event(name="refused", value=value)]:
            raise refused(value)
        case [Event(name=found, value=value)] if found == name:
            return decode(kind, value)
    raise InvalidRequest(f"a connection begins with {name}")


def refused(value: msgspec.Raw) -> PalestraError:
    """Return the error of the event `refused`."""
    error = decode(SentError, value).error()
    return error if isinstance(error, PalestraError) else PalestraError(str(error))


def event(name: str, value: Any) -> Event:
    """Return an event."""
    return Event(name, raw(value))


class MessageSocket:
    """Messages over a WebSocket; see `Duplex`. Who does not read has to wait, rather than fill the memory."""

    def __init__(self, connection: ClientConnection | ServerConnection) -> None:
        self._connection = connection
        self._due: asyncio.Queue[Message] = asyncio.Queue()
        self._drained = asyncio.Event()
        self._drained.set()
        self._sending = asyncio.create_task(self._send_all())

    def send(self, message: Message) -> None:
        """Send a message after all earlier ones."""
        self._due.put_nowait(message)
        if self._due.qsize() > MOST_DUE and not self._sending.done():
            self._drained.clear()

    async def drain(self) -> None:
        """Wait until few enough messages are due, or the connection has ended."""
        await self._drained.wait()

    async def frames(self) -> AsyncIterator[list[Message]]:
        """Yield what arrives, until the connection has ended. Raises InvalidRequest if it is no message."""
        with contextlib.suppress(ConnectionClosed):
            async for data in self._connection:
                is_large = len(data) > MOST_VALUES
                yield await in_thread(partial(unpack_messages, data)) if is_large else unpack_messages(data)
        self._drained.set()

    async def _send_all(self) -> None:
        """Send messages; those that are there at the same time in one, up to a bound."""
        try:
            while True:
                due = [await self._due.get()]
                size = _size(due[0])
                while len(due) < MOST_TOGETHER and size < MOST_BYTES_TOGETHER and not self._due.empty():
                    due.append(self._due.get_nowait())
                    size += _size(due[-1])
                if self._due.qsize() <= MOST_DUE:
                    self._drained.set()
                await self._connection.send(pack_messages(*due))
        except ConnectionClosed:
            pass
        finally:
            self._drained.set()

    async def end(self, code: int = 1000, reason: str = "") -> None:
        """Close the connection for a reason."""
        await self._connection.close(code, reason)

    def close(self) -> None:
        """Send nothing more."""
        self._sending.cancel()


def _size(message: Message) -> int:
    sent = getattr(message, "value", None) or getattr(message, "arguments", None)
    return 0 if sent is None else len(memoryview(sent))
