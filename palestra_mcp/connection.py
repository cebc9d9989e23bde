"""`McpConnection`: one session with an MCP server: requests, answers, and notifications."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

from palestra.errors import EnvironmentFailed, ProtocolMismatch
from palestra.types.messages import MAX_TOOLS
from palestra.version import __version__
from palestra.waiting import cancelled

Message = dict[str, Any]
MAX_MESSAGE_BYTES = 16 << 20


class Transport(ABC):
    """Carries JSON-RPC messages between this process and one server.

    Attributes:
        where: describes the server, for errors.
        ended_by_itself: whether the server is a process started here that was not killed.
    """

    where: str
    ended_by_itself: bool = False

    @abstractmethod
    async def start(self, receive: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Connect to the server. `receive` is called with each message of the server, `lost` once, with the reason,
        when no further message can come. Raises EnvironmentFailed: the server cannot be reached.
        """

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Send a message; the answer to a request may arrive before this returns. Raises EnvironmentFailed: the message
        could not be sent.
        """

    def agreed(self, protocol: str) -> None:  # noqa: B027 - stdio has nothing to do
        """Set the negotiated version of MCP."""

    def listen(self) -> None:  # noqa: B027
        """Begin to receive notifications; over stdio they come with everything else."""

    @abstractmethod
    async def close(self) -> None:
        """End the connection, and a process started for it."""


PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # the newest that begins with `initialize` first
_METHOD_NOT_FOUND = -32601
_MOST_UNASKED, _UNASKED_SECONDS = 10_000, 10.0  # messages of a server that answer no request, in so many seconds
_MOST_ANSWERS = 100  # to requests of the server that wait to be sent; a server that asks for more reads none of them


class McpError(Exception):
    """The server has answered a request with a JSON-RPC error."""


class McpConnection:
    """A session with a server, from `open` to `close`.

    Attributes:
        lost: why the session has ended; None: it has not.
        lost_alone: whether exactly one request was waiting at that moment.
        changes: number of notifications that the list of tools has changed.
    """

    def __init__(self, transport: Transport) -> None:
        """Create a closed session. The transport is closed with the session."""
        self.lost: str | None = None
        self.lost_alone = False
        self.changes = 0
        self._transport = transport
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._unasked, self._counted_since = 0, time.monotonic()  # messages of the server that answer no request
        self._sending: set[asyncio.Task[None]] = set()  # messages that are sent without a caller that waits

    @property
    def where(self) -> str:
        """Describe the server."""
        return self._transport.where

    async def open(self) -> None:
        """Begin the session. Raises ProtocolMismatch: server and client have no common version of MCP."""
        await self._transport.start(self._receive, self._lose)
        client = {"name": "palestra", "version": __version__}
        asked = {"protocolVersion": PROTOCOLS[0], "capabilities": {}, "clientInfo": client}
        try:
            answer = await self.request("initialize", asked)
        except McpError as error:
            raise EnvironmentFailed(f"{self.where} refuses the session: {error}") from error
        spoken = answer.get("protocolVersion")
        if spoken not in PROTOCOLS:
            raise ProtocolMismatch(
                f"{self.where} speaks version {spoken!r} of MCP, and this client {', '.join(PROTOCOLS)}; "
                "use another version of one of them"
            )
        able = answer.get("capabilities")
        if not isinstance(able, dict) or not isinstance(able.get("tools"), dict):
            raise EnvironmentFailed(f"{self.where} offers no tools")
        self._transport.agreed(str(spoken))
        await self._transport.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        # Also where the server does not say that its list changes: the official one announces changes all the same.
        self._transport.listen()

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's descriptions of its tools, from all pages of the list."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        seen: set[str] = set()
        while True:
            try:
                page = await self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            except McpError as error:
                raise EnvironmentFailed(f"{self.where} does not list its tools: {error}") from error
            tools = page.get("tools")
            if not isinstance(tools, list):
                raise EnvironmentFailed(f"{self.where} lists no tools, but {str(tools)[:80]}")
            found += [tool for tool in tools if isinstance(tool, dict)]
            cursor = page.get("nextCursor")
            if cursor is None:
                return found
            if cursor in seen or len(found) > MAX_TOOLS:
                raise EnvironmentFailed(f"{self.where} lists more than {MAX_TOOLS:,} tools, or some page twice")
            seen.add(cursor)

    async def request(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Cancelling the caller cancels the request at the server."""
        if self.lost is not None:
            raise EnvironmentFailed(self.lost)
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._transport.send({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters})
            message = await answer
        except asyncio.CancelledError:
            if method != "initialize" and self.lost is None:
                said = {"requestId": number, "reason": "the caller does not wait any longer"}
                note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": said}
                self._beside(self._transport.send(note))
            raise
        finally:
            del self._waiting[number]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # looked at, so that asyncio does not report one that came beside another error
        if "error" in message:
            error = message["error"]
            raise McpError(str(error.get("message") if isinstance(error, dict) else error)[:2000])
        result = message.get("result")
        if not isinstance(result, dict):
            raise EnvironmentFailed(f"{self.where} answers {method} with {str(result)[:80]}, which is no result")
        return result

    async def close(self) -> None:
        """End the session, and a server process started for it."""
        self._lose(f"the session with {self.where} is closed")
        try:
            await cancelled(*self._sending)
        finally:
            await self._transport.close()

    def _receive(self, message: Message) -> None:
        number = message.get("id")
        waiting = self._waiting.get(number) if "method" not in message and isinstance(number, int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
            return
        self._count_unasked()
        if self.lost is not None:
            raise EnvironmentFailed(self.lost)
        if "method" not in message:
            return
        if number is not None:
            if len(self._sending) >= _MOST_ANSWERS:
                self._lose(f"{self.where} takes no answers to its own requests")
            else:
                self._beside(self._transport.send(_answer_to(message)))
        elif message["method"] == "notifications/tools/list_changed":
            self.changes += 1

    def _count_unasked(self) -> None:
        """Give the session up where the server sends very many messages that answer no request."""
        now = time.monotonic()
        if now - self._counted_since > _UNASKED_SECONDS:
            self._counted_since, self._unasked = now, 0
        self._unasked += 1
        if self._unasked > _MOST_UNASKED:
            self._lose(f"{self.where} has sent {_MOST_UNASKED:,} messages that answer no request")

    @property
    def ended_by_itself(self) -> bool:
        """Return whether the server is a process started here that has ended or violated the protocol."""
        return self.lost is not None and self._transport.ended_by_itself

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost, self.lost_alone = reason, len(self._waiting) == 1
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentFailed(self.lost))

    def _beside(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send a message without waiting for it; where that fails, the next request says so."""
        task = asyncio.create_task(_unless_lost(sending))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


async def _unless_lost(sending: Coroutine[Any, Any, None]) -> None:
    try:
        await sending
    except EnvironmentFailed:
        return


def _answer_to(message: Message) -> Message:
    """Return the answer to a request of the server: this client answers `ping`, and has no other ability."""
    answer: Message = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "ping":
        return answer | {"result": {}}
    return answer | {"error": {"code": _METHOD_NOT_FOUND, "message": f"this client has no {message['method']}"}}
