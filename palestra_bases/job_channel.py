"""The messages of one job, over one connection after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from palestra.errors import InvalidRequest, TooManyRequests
from palestra.process.channel import Call, Cancel, Event, Failed, Message, Piece, Result
from palestra.process.codec import SentError, decode
from palestra_bases.protocol import is_stream

MOST_CALLS = 4096  # of a job that are executed, or have answers that may be asked for again
MOST_DUE = 1024  # messages that wait for the connection before nothing more is taken from it, and replies wait
MOST_TOGETHER = 64  # messages that are sent in one, unless fewer have
MOST_BYTES_TOGETHER = 2**20


class Outbox:
    """What is sent over one connection. A client that does not read has to wait, rather than fill the memory."""

    def __init__(self) -> None:
        self._due: asyncio.Queue[Message] = asyncio.Queue()
        self._drained, self._closed = asyncio.Event(), False
        self._drained.set()

    def put(self, message: Message) -> None:
        """Send a message after all earlier ones."""
        self._due.put_nowait(message)
        if self._due.qsize() > MOST_DUE and not self._closed:
            self._drained.clear()

    async def take(self) -> list[Message]:
        """Wait for messages, and return those that are sent in one."""
        due = [await self._due.get()]
        size = _size(due[0])
        while len(due) < MOST_TOGETHER and size < MOST_BYTES_TOGETHER and not self._due.empty():
            due.append(self._due.get_nowait())
            size += _size(due[-1])
        if self._due.qsize() <= MOST_DUE:
            self._drained.set()
        return due

    async def drain(self) -> None:
        """Wait until few enough messages are due, or the connection has ended."""
        await self._drained.wait()

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
        self._drained.set()


class JobChannel:
    """Implements `Duplex` for a server, whose calls outlast connections.

    A call that is sent again on a new connection is not executed again: it gets the answer that was kept. Replies in
    pieces end with their connection.
    """

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._outbox: Outbox | None = None
        self._running: dict[int, bool] = {}  # calls that are executed, and whether they stream
        self._answers: dict[int, Message] = {}
        self._closed = False

    def attach(self, waiting: Collection[int]) -> Outbox:
        """Begin with a new connection, and return what has to be sent over it. `waiting`: calls that the job still
        wants answers of.
        """
        self.detach()
        self._answers = {number: answer for number, answer in self._answers.items() if number in waiting}
        self._outbox = Outbox()
        return self._outbox

    def detach(self) -> None:
        """End what belongs to the connection that was lost."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = None
        for number in [number for number, streams in self._running.items() if streams]:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if self._running.get(number):
            del self._running[number]
            self._arrived.put_nowait(Cancel(number))

    def take(self, message: Message) -> None:
        """Hand a message of the connection to the server. Raises InvalidRequest if a job does not send that."""
        match message:
            case Call():
                if not self._closed:
                    self._begin(message)
            case Cancel(id=number):
                self._cancel(number)
            case Event(name="oldest", value=value):
                oldest = decode(int, value)
                self._answers = {number: answer for number, answer in self._answers.items() if number >= oldest}
            case _:
                raise InvalidRequest(f"a job does not send {type(message).__name__}")

    def _begin(self, call: Call) -> None:
        if (answer := self._answers.get(call.id)) is not None:
            self._post(answer)
        elif call.id in self._running:
            if self._running[call.id]:
                raise InvalidRequest(f"a reply with the id {call.id} is being sampled already")
        elif len(self._running) + len(self._answers) >= MOST_CALLS:
            busy = TooManyRequests(f"{MOST_CALLS} calls of this job are being executed; send fewer")
            self._post(Failed(call.id, SentError.of(busy)))
        else:
            self._running[call.id] = is_stream(call.method)
            self._arrived.put_nowait(call)

    def send(self, message: Message) -> None:
        """Send a message over the connection that there is; an answer is kept for the case that it is lost."""
        if isinstance(message, Piece) and message.id not in self._running:
            return
        if isinstance(message, Result | Failed):
            streams = self._running.pop(message.id, None)
            if streams is None:
                return
            if not streams:
                self._answers[message.id] = message
            self._end()
        self._post(message)

    async def drain(self) -> None:
        """Wait until the connection takes another piece of a reply."""
        if self._outbox is not None:
            await self._outbox.drain()

    def _post(self, message: Message) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    async def frames(self) -> AsyncIterator[list[Message]]:
        """Yield what arrives, until the channel is closed and all calls have been executed."""
        while (message := await self._arrived.get()) is not None:
            yield [message]

    def close(self) -> None:
        """Take no more calls, and end replies; the calls that have begun are executed."""
        self._closed = True
        self.detach()
        self._end()

    def _end(self) -> None:
        if self._closed and not self._running:
            self._arrived.put_nowait(None)


def _size(message: Message) -> int:
    return len(memoryview(message.value)) if isinstance(message, Result | Piece | Event) else 0
