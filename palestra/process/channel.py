"""Messages between two processes over a private socket: calls by id, results, events, heartbeats.

A frame is its length (four bytes, little-endian) and a list of messages in msgpack. `Channel` is one end in an event
loop, `BlockingChannel` one in a program without. `Remote` makes calls; `stub` describes the callee.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import msgspec

from palestra.errors import InvalidRequest
from palestra.process.codec import SentError, decode, encode
from palestra.waiting import cancelled

MOST_BYTES = 2**32 - 1  # of a frame
_LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, array_like=True, tag=0):
    """Calls a method; `arguments` are positional."""

    id: int
    method: str
    arguments: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag=1):
    """Cancels a call."""

    id: int


class Result(msgspec.Struct, array_like=True, tag=2):
    """A method's result; None at the end of a stream."""

    id: int
    value: msgspec.Raw


class Piece(msgspec.Struct, array_like=True, tag=3):
    """One item of a method that streams."""

    id: int
    value: msgspec.Raw


class Failed(msgspec.Struct, array_like=True, tag=4):
    """A method raised.

    Attributes:
        error: None: another process with the same call failed, and this one has undone it.
        trace: lines for a log; empty: callers expect the error.
    """

    id: int
    error: SentError | None
    trace: str = ""


class Event(msgspec.Struct, array_like=True, tag=5):
    """An unsolicited message from the other side."""

    name: str
    value: msgspec.Raw


class Beat(msgspec.Struct, array_like=True, tag=6):
    """A heartbeat, sent during calls too."""


Message = Call | Cancel | Result | Piece | Failed | Event | Beat
Cause = Callable[[InvalidRequest | None], Awaitable[Exception]]
"""Is asked for the error of all calls when the other side has closed its end, or, by its argument, has sent what is no
message."""


class CallBroken(Exception):
    """A call failed unexpectedly at the other end."""

    def __init__(self, error: Exception, trace: str) -> None:
        super().__init__(str(error))
        self.error, self.trace = error, trace


class TakenBack(Exception):
    """A call of several processes failed in one of them, and all have undone it.

    Attributes:
        problem: of this process; None: another one failed.
    """

    def __init__(self, problem: Exception | None) -> None:
        super().__init__(problem)
        self.problem = problem


def packed(messages: list[Message]) -> bytes:
    """Return the messages as a frame."""
    content = encode(messages)
    if len(content) > MOST_BYTES:
        raise InvalidRequest(f"a message to another process has {len(content):,} bytes, and may have {MOST_BYTES:,}")
    return _LENGTH.pack(len(content)) + content


def raw(value: Any) -> msgspec.Raw:
    """Return a value as a part of a message; see `encode`."""
    return msgspec.Raw(encode(value))


class Duplex(Protocol):
    """What carries messages both ways: a `Channel`, or something that outlasts single connections."""

    def send(self, message: Message) -> None:
        """Send a message."""
        ...

    def frames(self) -> AsyncIterator[list[Message]]:
        """Yield what arrives, until nothing can any more; see `Channel.frames`."""
        ...

    async def drain(self) -> None:
        """Wait until few enough messages wait to be sent, or the connection has ended."""
        ...

    def close(self) -> None:
        """Neither send nor receive any more."""
        ...


class Channel:
    """One end in an event loop.

    Messages sent in one turn of the loop share a frame: a forward pass produces a token for every running reply, and a
    frame for each would cost more than the token's share of the pass.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._due: list[Message] = []

    @classmethod
    async def over(cls, connection: socket.socket) -> Channel:
        """Return a channel over a connected Unix or TCP socket."""
        if connection.family == socket.AF_UNIX:
            return cls(*await asyncio.open_unix_connection(sock=connection))
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Send a message, in one frame with the others of this turn of the event loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(message)

    def _flush(self) -> None:
        due, self._due = self._due, []
        if due and not self._writer.is_closing():
            try:
                content = packed(due)
            except InvalidRequest:
                self._writer.close()  # the calls in it would wait for ever
                raise
            self._writer.write(content)

    async def frames(self) -> AsyncIterator[list[Message]]:
        """Yield each received frame's messages until the other side disconnects."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                return
            yield decode(list[Message], data)

    async def drain(self) -> None:
        """Wait until all sent messages have left this process, or the connection failed."""
        self._flush()
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Close the connection, which the other side detects."""
        self._writer.close()


class BlockingChannel:
    """One end in a program without an event loop: one thread reads, any may write."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._writing = end, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message."""
        content = packed([message])
        with self._writing:
            self._end.sendall(content)

    def messages(self) -> Iterator[Message]:
        """Yield received messages until the other side disconnects."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
                yield from decode(list[Message], self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if not (part := self._end.recv(min(count - len(found), 2**20))):
                raise EOFError
            found += part
        return bytes(found)


class Remote:
    """Makes calls at the other end of a channel and dispatches what it sends.

    Attributes:
        heard: monotonic time of the newest message.
        closed: done when the other side has closed its end.
    """

    def __init__(
        self,
        channel: Duplex | None,
        cause: Cause,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """Start to receive; without a channel, `renew` does. `close` closes the channel; `on_event` is called with each
        event of the other side.
        """
        self._cause, self._on_event = cause, on_event
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._streams: dict[int, asyncio.Queue[Piece | Result | Exception]] = {}
        self._lost: Exception | None = ConnectionError("there is no connection to the other process yet")
        self._channel: Duplex | None = None
        if channel is not None:
            self.renew(channel)

    def renew(self, channel: Duplex) -> None:
        """Make later calls over another channel; the other side is there again."""
        self._channel, self._lost = channel, None
        self.heard, self.closed = time.monotonic(), asyncio.get_running_loop().create_future()
        self._receiving = asyncio.create_task(self._receive(channel))

    async def call(self, method: str, *arguments: Any) -> msgspec.Raw:
        """Call a method and return its encoded result for `decode`. Raises CallBroken: the call failed unexpectedly.
        Raises TakenBack: all processes have undone the call.
        """
        return await self.post(method, *arguments)

    def post(self, method: str, *arguments: Any) -> asyncio.Future[msgspec.Raw]:
        """Send a call now, and return the future of its result; see `call`."""
        number = self._send(method, arguments)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        answer.add_done_callback(lambda _: self._calls.pop(number))
        return answer

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[msgspec.Raw, None]:
        """Call a method that streams, and yield its items. Closing the iterator cancels the call.
        Errors as in `call`.
        """
        number, pieces, ended = self._send(method, arguments), asyncio.Queue[Piece | Result | Exception](), False
        self._streams[number] = pieces
        try:
            while isinstance(piece := await pieces.get(), Piece):
                yield piece.value
            ended = True
            if isinstance(piece, Exception):
                raise piece
        finally:
            del self._streams[number]
            if not ended and self._lost is None:
                self._sent(Cancel(number))

    def _send(self, method: str, arguments: tuple[Any, ...]) -> int:
        if self._lost is not None:
            raise self._lost
        number = next(self._ids)
        self._sent(Call(number, method, raw(arguments)))
        return number

    def _sent(self, message: Message) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def _receive(self, channel: Duplex) -> None:
        problem = None
        try:
            async for messages in channel.frames():
                self.heard = time.monotonic()
                for message in messages:
                    self._take(message)
        except InvalidRequest as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - else no call would ever end
            problem = InvalidRequest(f"{type(error).__name__}: {error}")
        self.closed.set_result(None)
        try:
            found = await self._cause(problem)
        except Exception as error:  # noqa: BLE001
            found = error
        self.lose(found)

    def _take(self, message: Message) -> None:
        if isinstance(message, Piece | Result | Failed):
            found = _error(message) if isinstance(message, Failed) else message
            if (pieces := self._streams.get(message.id)) is not None:
                pieces.put_nowait(found)
            elif (call := self._calls.get(message.id)) is not None and not call.done():
                if isinstance(found, Exception):
                    call.set_exception(found)
                else:
                    call.set_result(found.value)
        elif isinstance(message, Event):
            self._on_event(message)

    def lose(self, error: Exception) -> None:
        """Declare the other side lost, and fail all calls, now and until `renew`."""
        self._lost = error
        for pieces in self._streams.values():
            pieces.put_nowait(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        if self._channel is not None:
            self._channel.close()

    async def close(self) -> None:
        """Close the channel; running calls fail."""
        if self._channel is not None:
            self._channel.close()
            await cancelled(self._receiving)
        if self._lost is None:
            self.lose(ConnectionAbortedError("the connection to the other process was closed"))


def _error(message: Failed) -> Exception:
    if message.error is None:
        return TakenBack(None)
    error = message.error.error()
    return CallBroken(error, message.trace) if message.trace else error
