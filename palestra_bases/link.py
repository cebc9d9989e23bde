"""The connection of a job to a base server, which is made again after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from palestra.errors import (
    BaseServerLost,
    ConfigError,
    Conflict,
    EngineFailure,
    InvalidRequest,
    PalestraError,
    PayloadTooLarge,
    Unauthorized,
)
from palestra.http_clients import WebSocket
from palestra.process.channel import Call, Cancel, Event, Failed, Message, Remote, Result
from palestra.process.codec import SentError
from palestra.proxies import through_proxy
from palestra.waiting import cancelled, race
from palestra_bases.protocol import (
    MOST_BYTES,
    MOST_VALUES,
    PROTOCOL,
    TAKEN_OVER,
    Hello,
    check_values,
    event,
    first,
    pack_messages,
    refused,
    unpack_messages,
)

log = logging.getLogger("palestra.base")
LONGEST_PAUSE_SECONDS = 2.0  # between two attempts to connect
UNIX = "unix:"
SCHEMES = (UNIX, "ws://", "wss://")
_UNREACHABLE = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError)


class Link:
    """One job's connection to a base server; implements `Duplex`.

    With a connection the server forgets the job: all calls fail with BaseServerLost until `renew`.

    Attributes:
        on_lost: called before any call fails because the server has forgotten the job.
        on_event: gets the events of the server.
    """

    def __init__(self, address: str, key: str, job: str, patience_seconds: float = 600.0) -> None:
        """Prepare; `open` connects."""
        if not address.startswith(SCHEMES):
            raise ConfigError(f"the address of a base server begins with {', '.join(SCHEMES)}, and not {address!r}")
        self.address = address
        self._key, self._job, self._patience = key, job, patience_seconds
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._arrived: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        self._calls: set[int] = set()  # those that have not ended
        self._is_lost, self._is_connected = asyncio.Event(), asyncio.Event()
        self._failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()
        self._closed: PalestraError | None = None
        self._task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_event: Callable[[Event], None] = lambda _: None
        self.remote = Remote(self, self._cause, lambda found: self.on_event(found))

    async def open(self) -> None:
        """Connect, waiting for an unreachable server. Raises Unauthorized if the key is unknown."""
        self._task = asyncio.create_task(self._run())
        await self.renew()

    @property
    def is_lost(self) -> bool:
        """Return whether the server has forgotten the job."""
        return self._is_lost.is_set()

    async def lost(self) -> None:
        """Wait until the server has forgotten the job."""
        await self._is_lost.wait()

    async def renew(self) -> None:
        """Wait until there is a connection again, and allow calls. Raises PalestraError if the link is given up."""
        while not (self._is_connected.is_set() or self._failure.done()):  # it may be lost again at once
            await race(self._is_connected.wait(), asyncio.shield(self._failure))
        self._is_lost.clear()
        if self._failure.done():
            raise self._failure.result()

    async def failure(self) -> PalestraError:
        """Wait until the link is given up, and return the reason; never returns after `close`."""
        return await asyncio.shield(self._failure)

    async def leave(self) -> None:
        """Disconnect, so that the server frees what the job has, and end all calls."""
        if self._closed is None:
            self._end_all(EngineFailure("the connection to the base server was closed"))
            if self._task is not None:
                await cancelled(self._task)
        await self.remote.close()

    # Messages

    def send(self, message: Message) -> None:
        """Send a call, or take one back that streams. Raises PayloadTooLarge: it is longer than the server takes."""
        if isinstance(message, Call):
            if self._closed is not None:
                raise self._closed
            if self.is_lost:
                raise self._forgotten()
            data = _checked(pack_messages(message))
            self._calls.add(message.id)
            self._outbox.put_nowait(data)
        elif isinstance(message, Cancel) and message.id in self._calls:
            self._calls.remove(message.id)
            self._outbox.put_nowait(pack_messages(message))

    async def frames(self) -> AsyncIterator[list[Message]]:
        """Yield what arrives, with the failures of calls that are lost, until the link is closed."""
        while (messages := await self._arrived.get()) is not None:
            yield messages

    def close(self) -> None:
        """End `frames`; see `leave`."""
        self._arrived.put_nowait(None)

    async def _cause(self, problem: InvalidRequest | None) -> Exception:
        return problem or self._closed or EngineFailure("the connection to the base server was closed")

    def _forgotten(self) -> BaseServerLost:
        return BaseServerLost(f"the connection to the base server at {self.address} was lost, and with it this job")

    def _end_all(self, error: PalestraError) -> None:
        """Fail all calls, now and later."""
        self._closed = error
        self.remote.lose(error)
        self._is_connected.set()  # `open` learns that there is none

    # The connection

    async def _run(self) -> None:
        """Reconnect until the link is closed or given up."""
        loop, pause = asyncio.get_running_loop(), 0.05
        since: float | None = None
        while True:
            why: BaseException | None = None
            try:
                async with self._connect() as connection:
                    await self._greet(connection)
                    since, pause = None, 0.05
                    await self._talk(connection)
            except InvalidStatus as error:
                why = error
                if error.response.status_code == 401:
                    self._give_up(Unauthorized(f"the base server at {self.address}: {_text(error.response.body)}"))
            except PalestraError as error:  # the server refuses this job, or does not speak the protocol
                self._give_up(error)
            except _UNREACHABLE as error:
                why = error
                if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code == TAKEN_OVER:
                    self._give_up(Conflict(f"the base server at {self.address}: {error.rcvd.reason}"))
            except Exception as error:  # noqa: BLE001 - a mistyped address, say: else all calls would wait for ever
                said = f"{type(error).__name__}: {error}"
                self._give_up(EngineFailure(f"the base server at {self.address} can't be used: {said}"))
            if self._closed is not None:
                return
            self._lose()
            now = loop.time()
            if since is None:
                since = now
                log.warning(
                    "the base server at %s can't be reached%s (%s); trying again for %g s",
                    self.address,
                    through_proxy(self.address),
                    why or "it has closed the connection",
                    self._patience,
                )
            if now - since > self._patience:
                self._give_up(
                    EngineFailure(f"the base server at {self.address} could not be reached for {self._patience:g} s")
                )
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _connect(self) -> connect:
        options: dict[str, Any] = {
            "additional_headers": {"authorization": f"Bearer {self._key}"},
            "max_size": MOST_BYTES,
            "compression": None,
            "user_agent_header": None,
            "open_timeout": 20,
            "logger": logging.getLogger("palestra.base.socket"),
        }
        if self.address.startswith(UNIX):
            return unix_connect(self.address.removeprefix(UNIX), uri="ws://localhost/", **options)
        return WebSocket(self.address, **options)

    async def _greet(self, connection: ClientConnection) -> None:
        await connection.send(pack_messages(event("hello", Hello(protocol=PROTOCOL, job=self._job))))
        first(await connection.recv(), "welcome", None)
        self._outbox = asyncio.Queue()
        self._is_connected.set()

    def _lose(self) -> None:
        """Fail all calls, because the server forgets the job with its connection."""
        if not self._is_connected.is_set():
            return
        self._is_connected.clear()
        self._is_lost.set()
        self.on_lost()
        error = SentError.of(self._forgotten())
        self._arrived.put_nowait([Failed(number, error) for number in self._calls])
        self._calls.clear()

    async def _talk(self, connection: ClientConnection) -> None:
        """Send posted calls and dispatch incoming messages until the connection ends."""
        sending = asyncio.create_task(self._send_all(connection))
        try:
            async for data in connection:
                messages = unpack_messages(data)
                for message in messages:
                    if isinstance(message, Event) and message.name == "refused":
                        raise refused(message.value)
                    if isinstance(message, Result | Failed):
                        self._calls.discard(message.id)
                self._arrived.put_nowait(messages)
        finally:
            with contextlib.suppress(*_UNREACHABLE):
                await cancelled(sending)

    async def _send_all(self, connection: ClientConnection) -> None:
        while True:
            await connection.send(await self._outbox.get())

    def _give_up(self, error: PalestraError) -> None:
        """Fail everything for good."""
        if self._closed is None:
            self._end_all(error)
            self._failure.set_result(error)


def _checked(data: bytes) -> bytes:
    wanted = "lower rollout.groups_per_step, or raise algorithm.minibatches"
    if len(data) > MOST_BYTES:
        raise PayloadTooLarge(
            f"a message to the base server has {len(data):,} bytes, and it takes {MOST_BYTES:,}; {wanted}"
        )
    try:
        check_values(data, MOST_VALUES)
    except InvalidRequest as error:
        raise PayloadTooLarge(f"{error}; {wanted}") from error
    return data


def _text(body: bytes | bytearray | None) -> str:
    return bytes(body or b"").decode(errors="replace").strip()
