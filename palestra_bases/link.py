"""The connection of a job to a base server, which is made again after a loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.client import ClientConnection, unix_connect
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
from palestra.process.channel import Call, Event, Message, Remote
from palestra.proxies import through_proxy
from palestra_bases.protocol import (
    MOST_BYTES,
    MOST_VALUES,
    PROTOCOL,
    TAKEN_OVER,
    Hello,
    MessageSocket,
    check_values,
    event,
    first,
    pack_messages,
    refused,
)

log = logging.getLogger("palestra.base")
LONGEST_PAUSE_SECONDS = 2.0  # between two attempts to connect
UNIX = "unix:"
SCHEMES = (UNIX, "ws://", "wss://")
_UNREACHABLE = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError)


class _Socket(MessageSocket):
    def send(self, message: Message) -> None:
        """Send a message. Raises PayloadTooLarge: it is longer than the server takes."""
        if isinstance(message, Call):
            _check_size(bytes(message.arguments))
        super().send(message)


class Link:
    """One job's connection to a base server.

    With a connection the server forgets the job: all calls fail with BaseServerLost until `renew`.

    Attributes:
        remote: makes the calls.
        on_lost: called before any call fails because the server has forgotten the job.
        on_event: gets the events of the server.
    """

    def __init__(self, address: str, key: str, job: str, patience_seconds: float = 600.0) -> None:
        """Prepare; `renew` connects."""
        if not address.startswith(SCHEMES):
            raise ConfigError(f"the address of a base server begins with {', '.join(SCHEMES)}, and not {address!r}")
        self.address = address
        self._key, self._job, self._patience = key, job, patience_seconds
        self._connection: ClientConnection | None = None
        self._lost = asyncio.Event()
        self._failure: asyncio.Future[PalestraError] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] = lambda: None
        self.on_event: Callable[[Event], None] = lambda _: None
        self.remote = Remote(None, self._cause, self._take)

    @property
    def is_lost(self) -> bool:
        """Return whether the server has forgotten the job."""
        return self._lost.is_set() and not self._failure.done()

    async def lost(self) -> None:
        """Wait until the server has forgotten the job."""
        await self._lost.wait()

    async def failure(self) -> PalestraError:
        """Wait until the link is given up, and return the reason; never returns after `leave`."""
        return await asyncio.shield(self._failure)

    async def renew(self) -> None:
        """Connect, waiting for an unreachable server, and allow calls. Raises PalestraError if the link is given up:
        Unauthorized if the key is unknown.
        """
        pause, until, said = 0.05, time.monotonic() + self._patience, False
        while not self._failure.done():
            try:
                return await self._connect()
            except PalestraError as error:  # the server refuses this job, or does not speak the protocol
                self._give_up(error)
            except _UNREACHABLE as error:
                if isinstance(error, InvalidStatus) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
                    body = bytes(error.response.body or b"").decode(errors="replace").strip()
                    self._give_up(Unauthorized(f"the base server at {self.address}: {body}"))
                elif time.monotonic() > until:
                    self._give_up(
                        EngineFailure(
                            f"the base server at {self.address} could not be reached for {self._patience:g} s"
                        )
                    )
                elif not said:
                    said, through = True, through_proxy(self.address)
                    log.warning(
                        "the base server at %s can't be reached%s (%s); trying again for %g s",
                        *(self.address, through, error, self._patience),
                    )
            except Exception as error:  # noqa: BLE001 - a mistyped address, say
                why = f"{type(error).__name__}: {error}"
                self._give_up(EngineFailure(f"the base server at {self.address} can't be used: {why}"))
            if not self._failure.done():
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise self._failure.result()

    async def leave(self) -> None:
        """Disconnect, so that the server frees what the job has, and end all calls."""
        self.remote.lose(EngineFailure("the connection to the base server was closed"))
        await self.remote.close()
        if self._connection is not None:
            await self._connection.close()

    async def _connect(self) -> None:
        options: dict[str, Any] = {
            "additional_headers": {"authorization": f"Bearer {self._key}"},
            "max_size": MOST_BYTES,
            "compression": None,
            "user_agent_header": None,
            "open_timeout": 20,
            "logger": logging.getLogger("palestra.base.socket"),
        }
        if self.address.startswith(UNIX):
            connection = await unix_connect(self.address.removeprefix(UNIX), uri="ws://localhost/", **options)
        else:
            connection = await WebSocket(self.address, **options)
        try:
            await connection.send(pack_messages(event("hello", Hello(protocol=PROTOCOL, job=self._job))))
            first(await connection.recv(), "welcome", None)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._lost.clear()
        self.remote.renew(_Socket(connection))

    def _take(self, found: Event) -> None:
        if found.name == "refused":
            self._give_up(refused(found.value))
        else:
            self.on_event(found)

    async def _cause(self, problem: InvalidRequest | None) -> Exception:
        """Return the error of calls whose connection has ended."""
        assert self._connection is not None
        if self._connection.close_code == TAKEN_OVER:
            self._give_up(Conflict(f"the base server at {self.address}: {self._connection.close_reason}"))
        elif problem is not None:
            self._give_up(problem)
        if self._failure.done():
            return self._failure.result()
        self._lost.set()
        self.on_lost()
        return BaseServerLost(f"the connection to the base server at {self.address} was lost, and with it this job")

    def _give_up(self, error: PalestraError) -> None:
        """Fail everything for good."""
        if not self._failure.done():
            self._failure.set_result(error)
            self.remote.lose(error)


def _check_size(data: bytes) -> None:
    wanted = "lower rollout.groups_per_step, or raise algorithm.minibatches"
    if len(data) > MOST_BYTES:
        raise PayloadTooLarge(
            f"a message to the base server has {len(data):,} bytes, and it takes {MOST_BYTES:,}; {wanted}"
        )
    try:
        check_values(data, MOST_VALUES)
    except InvalidRequest as error:
        raise PayloadTooLarge(f"{error}; {wanted}") from error
