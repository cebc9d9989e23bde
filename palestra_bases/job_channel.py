"""The messages of one job at its base server, over its connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from palestra.errors import InvalidRequest, TooManyRequests
from palestra.process.channel import Call, Cancel, Event, Failed, Message, Piece, Result
from palestra.process.codec import SentError
from palestra.threads import in_thread
from palestra.waiting import cancelled
from palestra_bases.protocol import MOST_VALUES, is_stream, pack_messages, unpack_messages

MOST_CALLS = 4096  # of a job that are executed at the same time
MOST_DUE = 1024  # messages that wait for the connection before nothing more is taken from it, and replies wait
MOST_TOGETHER = 64  # messages that are sent in one, unless fewer have
MOST_BYTES_TOGETHER = 2**20


class JobChannel:
    """Implements `Duplex` for a server. A client that does not read has to wait, rather than fill the memory."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._due: asyncio.Queue[Message] = asyncio.Queue()
        self._drained, self._idle, self._closed = asyncio.Event(), asyncio.Event(), False
        self._drained.set()
        self._running: dict[int, bool] = {}  # calls that are executed, and whether they stream

    def send(self, message: Message) -> None:
        """Send a message after all earlier ones."""
        if isinstance(message, Result | Failed):
            self._end(message.id)
        self._due.put_nowait(message)
        if self._due.qsize() > MOST_DUE and not self._closed:
            self._drained.clear()

    async def drain(self) -> None:
        """Wait until few enough messages are due, or the connection has ended."""
        await self._drained.wait()

    async def frames(self) -> AsyncIterator[list[Message]]:
        """Yield what arrives, until the connection has ended; then end replies, and wait until all other calls have
        been executed.
        """
        sending, problem = asyncio.create_task(self._send_all()), None
        try:
            async for data in self._connection:
                is_large = len(data) > MOST_VALUES
                found = await in_thread(partial(unpack_messages, data)) if is_large else unpack_messages(data)
                for message in found:
                    await self.drain()
                    if self._takes(message):
                        yield [message]
        except ConnectionClosed:
            pass
        except InvalidRequest as error:
            problem = error
        self.close()
        yield [Cancel(number) for number, streams in self._running.items() if streams]
        while not all(self._running.values()):
            self._idle.clear()
            await self._idle.wait()
        with contextlib.suppress(ConnectionClosed):
            await cancelled(sending)
        if problem is not None:
            raise problem

    def _takes(self, message: Message) -> bool:
        """Return whether a message is for the server. Raises InvalidRequest if a job does not send that."""
        match message:
            case Call(id=number) if number in self._running:
                raise InvalidRequest(f"a call with the id {number} is being executed already")
            case Call(id=number) if len(self._running) >= MOST_CALLS:
                busy = TooManyRequests(f"{MOST_CALLS} calls of this job are being executed; send fewer")
                self.send(Failed(number, SentError.of(busy)))
            case Call(id=number, method=method):
                self._running[number] = is_stream(method)
                return True
            case Cancel(id=number):
                if self._running.get(number):
                    self._end(number)
                    return True
            case _:
                raise InvalidRequest(f"a job does not send {type(message).__name__}")
        return False

    def _end(self, number: int) -> None:
        self._running.pop(number, None)
        self._idle.set()

    async def _send_all(self) -> None:
        """Send messages; those that are there at the same time in one, up to a bound."""
        try:
            while True:
                await self._connection.send(pack_messages(*await self._together()))
        finally:
            self.close()

    async def _together(self) -> list[Message]:
        """Wait for messages, and return those that are sent in one."""
        due = [await self._due.get()]
        size = _size(due[0])
        while len(due) < MOST_TOGETHER and size < MOST_BYTES_TOGETHER and not self._due.empty():
            due.append(self._due.get_nowait())
            size += _size(due[-1])
        if self._due.qsize() <= MOST_DUE:
            self._drained.set()
        return due

    async def refuse(self, code: int, reason: str) -> None:
        """Close the connection for a reason."""
        await self._connection.close(code, reason)

    def close(self) -> None:
        """Let nobody wait for the connection any more."""
        self._closed = True
        self._drained.set()


def _size(message: Message) -> int:
    return len(memoryview(message.value)) if isinstance(message, Result | Piece | Event) else 0
