"""`SessionLink`: a client's side of one session, over WebSockets that break and are made again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from palestra.envs.remote.address import ServerAddress
from palestra.envs.remote.stream import MessageStream
from palestra.errors import (
    Conflict,
    ConnectionLost,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    InvalidRequest,
    NotScored,
    PalestraError,
    Unauthorized,
)
from palestra.http_clients import WebSocket
from palestra.proxies import through_proxy
from palestra.types.env_wire import (
    CLOSE_ENDED,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    CLOSE_TOO_LARGE,
    FRAME_BYTES,
    MOST_WAITING,
    SERVER_FRAME,
    Done,
    Failed,
    Observed,
    Over,
    ServerMessage,
    SessionCreated,
    Withdrawn,
)
from palestra.waiting import cancelled, race

ACKNOWLEDGED_AFTER = 32  # messages of the server, where there is nothing to send that would carry the acknowledgement
PING_SECONDS = 20.0  # between two signs of life, and the longest time for an answer
_FOR_GOOD = (CLOSE_REFUSED, CLOSE_TOO_LARGE, CLOSE_REPLACED, CLOSE_ENDED)
Event = Observed | Withdrawn | Over | Failed


class SessionEnded(EnvironmentFailed):
    """The session is no more: its lease ran out, its server was started again, or others waited for its place."""


class SessionLink:
    """Sends and receives a session's messages; a connection that is lost is made again.

    Attributes:
        created: the server's answer with which the session began.
    """

    def __init__(self, address: ServerAddress, created: SessionCreated) -> None:
        """Create the link; `open` begins to connect."""
        self.created = created
        self._address = address
        self._stream = MessageStream(created.max_message_bytes)
        self._wake = asyncio.Event()
        self._acknowledged = -1  # number of the last message of the server of which the connection has told it
        self._urgent = False  # whether the server is told what has been received even if there is nothing to send
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._reset = 0  # number of the last message that began an episode
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # of that episode; None: the session has ended
        self._failure: PalestraError | None = None
        self._running: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to connect."""
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop, without a word to the server."""
        if self._running is not None:
            await cancelled(self._running)

    def send(self, **message: Any) -> int:
        """Send a message, over this connection or a later one, and return its number.

        Raises:
            InvalidRequest, PayloadTooLarge: the message can't be sent.
            PalestraError: the session has ended.
        """
        if self._failure is not None:
            raise self._failure
        number = self._stream.add(message)
        self._wake.set()
        return number

    async def ask(self, **message: Any) -> None:
        """Send a message and wait until the server has done what it says.

        Raises:
            PalestraError: the server has failed to do it, or the session has ended.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = self.send(**message)
        self._answers[number] = answer
        if message["type"] == "reset":
            self._reset = number
        try:
            await answer
        finally:
            del self._answers[number]

    async def next(self) -> Event:
        """Wait for the next event of the episode and return it.

        Raises:
            PalestraError: the session has ended.
        """
        found = None if self._failure is not None and self._events.empty() else await self._events.get()
        if found is None:
            assert self._failure is not None
            raise self._failure
        return found

    async def _run(self) -> None:
        """Keep the session connected until it ends, or the server can't be reached for `retry_seconds`."""
        loop, endpoint = asyncio.get_running_loop(), self._address.endpoint
        lost_at, attempt = loop.time(), 0
        while True:
            try:
                async with WebSocket(
                    self._address.stream_url(self.created.session_id, self._stream.received),
                    additional_headers={"authorization": f"Bearer {self.created.key}"},
                    max_size=self.created.max_message_bytes + FRAME_BYTES,
                    compression=None,
                    ping_interval=PING_SECONDS,
                    ping_timeout=PING_SECONDS,
                    close_timeout=1.0,
                ) as websocket:
                    await self._converse(websocket)
                    error = _closed(self._address.url, websocket)
            except (OSError, InvalidHandshake, TimeoutError) as caught:
                error = _refusal(self._address.url, caught)
            except (ValidationError, PalestraError) as caught:
                error = EnvironmentFailed(f"{self._address.url} does not keep to the protocol: {caught}")
            if not isinstance(error, ConnectionLost):
                self._fail(error)
                return
            if self._acknowledged >= 0:  # this connection had been made
                lost_at, attempt, self._acknowledged = loop.time(), 0, -1
            pause = endpoint.backoff(attempt)
            if loop.time() + pause - lost_at > endpoint.retry_seconds:
                self._fail(error)
                return
            endpoint.failed(error, endpoint.retry_seconds)
            attempt += 1
            await asyncio.sleep(pause)

    async def _converse(self, websocket: ClientConnection) -> None:
        """Exchange frames until the connection is lost."""
        with contextlib.suppress(ConnectionClosed):
            first = SERVER_FRAME.validate_json(await websocket.recv())
            self._stream.resume(first.ack)
            self._address.endpoint.answered()
            self._take(first.ack, first.messages)
            await race(self._read(websocket), self._write(websocket), self._renew_lease())

    async def _read(self, websocket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for text in websocket:
                frame = SERVER_FRAME.validate_json(text)
                self._take(frame.ack, frame.messages)

    async def _write(self, websocket: ClientConnection) -> None:
        """Send what the server does not have."""
        stream, sent = self._stream, self._stream.acknowledged
        with contextlib.suppress(ConnectionClosed):
            while True:
                self._wake.clear()
                self._acknowledged, self._urgent = stream.received, False
                frame, sent = stream.frame(sent)
                await websocket.send(frame, text=True)
                while sent == stream.sent and not self._urgent:
                    await self._wake.wait()
                    self._wake.clear()

    async def _renew_lease(self) -> None:
        """Send a frame in each third of the lease, even if there is nothing else to send."""
        while True:
            await asyncio.sleep(self.created.lease_seconds / 3)
            self._soon()

    def _take(self, ack: int, messages: tuple[ServerMessage, ...]) -> None:
        """Handle the messages of a frame that have not been handled before."""
        self._stream.acknowledge(ack)
        for message in self._stream.accept(messages):
            if isinstance(message, Done | Over | Failed):
                self._soon()  # the server keeps the session's place until it knows that this has arrived
            if isinstance(message, Done | Failed) and message.of == self._reset:
                self._forget_events()  # of the episode before
            answer = self._answers.get(message.of or 0) if isinstance(message, Done | Failed) else None
            if answer is not None:
                _settle(answer, error_of(message) if isinstance(message, Failed) else None)
            elif not isinstance(message, Done):
                if self._events.qsize() >= MOST_WAITING:
                    raise EnvironmentFailed(f"more than {MOST_WAITING:,} messages came that no episode waits for")
                self._events.put_nowait(message)
        if self._stream.received - self._acknowledged >= ACKNOWLEDGED_AFTER:
            self._soon()

    def _soon(self) -> None:
        self._urgent = True
        self._wake.set()

    def _fail(self, error: PalestraError) -> None:
        self._failure = error
        self._events.put_nowait(None)
        for answer in self._answers.values():
            _settle(answer, error)

    def _ended(self, running: asyncio.Task[None]) -> None:
        """Tell those that wait of an error that is none of a connection."""
        if not running.cancelled() and (error := running.exception()) is not None:
            self._fail(EnvironmentFailed(f"{self._address.url}: {type(error).__name__}: {error}"))

    def _forget_events(self) -> None:
        while not self._events.empty():
            self._events.get_nowait()


def _settle(answer: asyncio.Future[None], error: PalestraError | None) -> None:
    if answer.done():  # cancelled, because its caller waits no more
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


def error_of(message: Failed) -> PalestraError:
    """Return the error that a message of the server stands for, in the server's words."""
    kinds: dict[str, type[PalestraError]] = {
        kind("").code: kind for kind in (Conflict, EpisodeForfeited, InvalidEnvironment, InvalidRequest, NotScored)
    }
    return kinds.get(message.code, EnvironmentFailed)(message.message)


def _refusal(url: str, error: Exception) -> PalestraError:
    """Return the error of a connection that was not made; ConnectionLost: it may be made later."""
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        if status == 404:
            return SessionEnded(f"{url} knows this session no more; its lease has run out, or the server has restarted")
        if status == 401:
            return Unauthorized(f"{url} refuses the session's key")
        if status < 500 and status not in (408, 425, 429):
            said = (error.response.body or b"").decode(errors="replace")
            return EnvironmentFailed(f"{url} answered {status}{through_proxy(url)}: {said:.200}")
    return ConnectionLost(f"{url} can't be reached{through_proxy(url)}: {str(error) or type(error).__name__}")


def _closed(url: str, websocket: ClientConnection) -> PalestraError:
    """Return the error of a connection that has ended; ConnectionLost: another one may be made."""
    code, reason = websocket.close_code, websocket.close_reason
    if code == CLOSE_ENDED:
        return SessionEnded(f"{url}: {reason}")
    if code in _FOR_GOOD:
        return EnvironmentFailed(f"{url} has closed the session: {reason or code}")
    return ConnectionLost(f"{url} can't be reached: the connection was lost ({code} {reason or ''})")
