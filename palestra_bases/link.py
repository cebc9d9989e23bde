"""The connection of a job to a base server: kept alive, and made again where it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from palestra.backend.frames import MOST_BYTES, PROTOCOL, TAKEN_OVER, Frame, check_header, read_frame, write_frame
from palestra.backend.typed import error_of
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
from palestra.proxies import through_proxy
from palestra.waiting import cancelled, race

log = logging.getLogger("palestra.base")
LONGEST_PAUSE_SECONDS = 2.0  # between two attempts to connect
UNIX = "unix:"
SCHEMES = (UNIX, "ws://", "wss://")
_UNREACHABLE = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError)


@dataclass(slots=True)
class _Call:
    """A call that has no answer yet, with its message, which is sent again on a new connection."""

    data: bytes
    answer: asyncio.Future[Frame]


class Link:
    """One job's connection to a base server.

    Calls survive a lost connection: they are sent again, and the server executes each once. Replies that are being
    sampled end with BaseServerLost, and are asked for again. Where the server does not know the job any more, because
    it is another process or the lease has run out, all calls fail with BaseServerLost until `renew`.
    """

    def __init__(self, address: str, key: str, job: str, patience_seconds: float = 600.0) -> None:
        """Prepare; `open` connects.

        Args:
            address: `unix:PATH`, `ws://HOST:PORT` or `wss://HOST:PORT`.
            job: names the job among those of the tenant.
            patience_seconds: how long a server that can't be reached is waited for.

        Raises:
            ConfigError: the address can't be used.
        """
        if not address.startswith(SCHEMES):
            raise ConfigError(f"the address of a base server begins with {', '.join(SCHEMES)}, and not {address!r}")
        self.address = address
        self._key, self._job, self._patience = key, job, patience_seconds
        self._process = secrets.token_hex(8)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._calls: dict[int, _Call] = {}
        self._replies: dict[int, asyncio.Queue[Frame | PalestraError]] = {}
        self._numbers = 0
        self._most_bytes = MOST_BYTES
        self._opened = False
        self._is_lost, self._is_connected = asyncio.Event(), asyncio.Event()
        self._failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()
        self._closed: PalestraError | None = None
        self._task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] = lambda: None  # called before any call fails

    async def open(self) -> None:
        """Connect, and wait for a server that can't be reached.

        Raises:
            Unauthorized: the key is not known there.
            ConfigError: the server speaks another version of the protocol.
            EngineFailure: it could not be reached for longer than the patience.
        """
        self._task = asyncio.create_task(self._run())
        await race(self._is_connected.wait(), asyncio.shield(self._failure))
        if self._failure.done():
            raise self._failure.result()

    @property
    def is_lost(self) -> bool:
        """Return whether the server has forgotten the job, so that everything has to be made anew."""
        return self._is_lost.is_set()

    async def lost(self) -> None:
        """Return when the server has forgotten the job."""
        await self._is_lost.wait()

    def renew(self) -> None:
        """Let calls be made again after a loss."""
        self._is_lost.clear()

    async def failure(self) -> PalestraError:
        """Return when the link is given up, and say why; one that was closed never returns."""
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        """Say goodbye, so that the server frees what the job has, and end all calls."""
        if self._closed is not None:
            return
        is_connected = self._is_connected.is_set()
        self._closed = EngineFailure("the connection to the base server was closed")
        self._end_all(self._closed)
        if self._task is None:
            return
        if is_connected:
            self._outbox.put_nowait(write_frame({"goodbye": True}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await asyncio.wait((self._task,))
        await cancelled(self._task)

    # Calls

    async def call(self, do: str, arguments: Mapping[str, Any]) -> Frame:
        """Make a call and return the message of its answer.

        Args:
            arguments: by name.

        Raises:
            BaseServerLost: the server has forgotten the job.
            PayloadTooLarge: the message is longer than the server takes.
            PalestraError: what the server has raised.
        """
        return await self.post(do, arguments)

    def post(self, do: str, arguments: Mapping[str, Any]) -> asyncio.Future[Frame]:
        """Send a call after all earlier ones, and return the future of its answer; see `call`."""
        self._check_open()
        self._numbers += 1
        number, oldest = self._numbers, min(self._calls, default=self._numbers)
        data = self._written({"id": number, "oldest": oldest, "do": do, "with": arguments})
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[number] = _Call(data, answer)
        answer.add_done_callback(lambda _: self._calls.pop(number, None))
        if self._is_connected.is_set():
            self._outbox.put_nowait(data)
        return answer

    async def generate(self, arguments: Any) -> AsyncGenerator[Frame, None]:
        """Ask for a reply and yield its pieces. Closing the iterator cancels the request.

        Args:
            arguments: an `EngineRequest`.

        Raises:
            BaseServerLost: the connection was lost; the request may be made again.
            PalestraError: what the server has raised.
        """
        await self._is_connected.wait()
        self._check_open()
        self._numbers += 1
        number, pieces = self._numbers, asyncio.Queue[Frame | PalestraError]()
        data = self._written({"id": number, "do": "generate", "with": arguments})
        self._replies[number] = pieces
        self._outbox.put_nowait(data)
        ended = False
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, PalestraError):
                    ended = True
                    raise piece
                if "piece" not in piece.header:
                    ended = True
                    return
                yield piece
        finally:
            del self._replies[number]
            if not ended and self._is_connected.is_set():
                self._outbox.put_nowait(write_frame({"cancel": number}))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if self.is_lost:
            raise BaseServerLost(f"the base server at {self.address} was started again, and has forgotten this job")

    def _written(self, header: Mapping[str, Any]) -> bytes:
        data, wanted = write_frame(header), "lower rollout.groups_per_step, or raise algorithm.minibatches"
        if len(data) > self._most_bytes:
            raise PayloadTooLarge(
                f"a message to the base server has {len(data):,} bytes, and it takes {self._most_bytes:,}; {wanted}"
            )
        try:
            check_header(data)
        except InvalidRequest as error:
            raise PayloadTooLarge(f"{error}; {wanted}") from error
        return data

    def _end_all(self, error: PalestraError) -> None:
        """Fail all calls and replies."""
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(error)
                call.answer.exception()  # one that nothing waits for is no defect
        self._end_replies(error)
        self._is_connected.set()  # those that wait for a connection learn that there is none

    def _end_replies(self, error: PalestraError) -> None:
        for pieces in self._replies.values():
            pieces.put_nowait(error)

    # The connection

    async def _run(self) -> None:
        """Connect again and again until the link is closed or given up."""
        loop, pause = asyncio.get_running_loop(), 0.05
        since: float | None = None
        while not self._is_over():
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
            if self._is_over():
                return
            self._is_connected.clear()
            self._end_replies(BaseServerLost(f"the connection to the base server at {self.address} was lost"))
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

    def _is_over(self) -> bool:
        return self._closed is not None

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
        """Say which job this is, and send again what has no answer."""
        hello = {"protocol": PROTOCOL, "job": self._job, "process": self._process, "waiting": list(self._calls)}
        await connection.send(write_frame(hello))
        answer = _read(await connection.recv())
        if "error" in answer.header:
            raise error_of(answer.header["error"])
        self._most_bytes = int(answer.header["most_bytes"])
        if self._opened and not answer.header["known"]:
            self._lose()
        self._opened = True
        self._outbox = asyncio.Queue()
        for _, call in sorted(self._calls.items()):
            self._outbox.put_nowait(call.data)
        self._is_connected.set()

    def _lose(self) -> None:
        """Fail all calls, because the server has forgotten the job."""
        self._is_lost.set()
        self.on_lost()
        log.warning("the base server at %s has forgotten this job, which begins again from its state", self.address)
        error = BaseServerLost(f"the base server at {self.address} was started again, and has forgotten this job")
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(error)
                call.answer.exception()
        self._calls.clear()

    async def _talk(self, connection: ClientConnection) -> None:
        """Send what is posted and hand out what arrives until the connection ends."""
        sending = asyncio.create_task(self._send_all(connection))
        try:
            async for data in connection:
                frame = _read(data)
                number = frame.header.get("id")
                error = error_of(frame.header["error"]) if "error" in frame.header else None
                if number is None:
                    raise error or InvalidRequest("the base server has sent a message without an id")
                if (pieces := self._replies.get(number)) is not None:
                    pieces.put_nowait(error or frame)
                elif (call := self._calls.get(number)) is not None and not call.answer.done():
                    if error is not None:
                        call.answer.set_exception(error)
                    else:
                        call.answer.set_result(frame)
        finally:
            with contextlib.suppress(*_UNREACHABLE):
                await cancelled(sending)

    async def _send_all(self, connection: ClientConnection) -> None:
        while True:
            await connection.send(await self._outbox.get())

    def _give_up(self, error: PalestraError) -> None:
        """Fail everything for good."""
        if self._closed is None:
            self._closed = error
            self._end_all(error)
            self._failure.set_result(error)


def _read(data: str | bytes) -> Frame:
    if isinstance(data, str):
        raise InvalidRequest("the base server has sent a text, which this protocol does not have")
    return read_frame(data)


def _text(body: bytes | bytearray | None) -> str:
    return bytes(body or b"").decode(errors="replace").strip()
