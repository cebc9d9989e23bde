"""uvicorn's HTTP/1.1, with limits before authentication, and what a client that disconnects cancels.

uvicorn has no limit for the time until a request's headers are complete, for their size, for pipelined requests, or for
unread answers (docs/explanation/architecture.md, "HTTP and dialects").
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from palestra.http.connections import Connections

T = TypeVar("T")
CONNECTION = "palestra.connection"  # key in the ASGI scope of a request, whose value is its `LimitedProtocol`


class RefusedHead(Exception):
    """Ends the parsing of a client's data, after the connection was closed."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses heads that are too large with 431, and those that do not end in time with 408.

    A client that sends many requests before it reads their answers is disconnected: each of them is held in memory, and
    uvicorn reads more of them whenever one is answered.

    Attributes:
        known: whether a request of this connection had a good key.
        until: when it is closed while it waits; see `Connections`.
        has_whole_body: whether the body of the newest request, and so of all before it, was received to its end.
        lost: whether it is closed.
        on_lost: called when it is closed; None: nobody waits for that.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.known, self.until, self.has_whole_body = False, math.inf, False
        self.lost = False
        self.on_lost: Callable[[], object] | None = None
        self._all, self._limits = connections, connections.limits
        self._in_head = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        # Bytes since the parser last reported a whole head or a piece of a body: it reports a header only at its end.
        self._unparsed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection, or refuse it with 503 (called by asyncio)."""
        super().connection_made(transport)
        self._all.counts["accepted"] += 1
        if self._all.free_capacity():
            self._wait()
            return
        with contextlib.suppress(OSError):
            # If the connection were closed with unread bytes, the kernel would drop the answer.
            os.read(transport.get_extra_info("socket").fileno(), 65_536)
        self._refuse(503, "all connections of this server are in use; try again soon")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection (called by asyncio)."""
        self._all.forget(self)
        for cycle in self._unanswered:  # uvicorn tells only the newest, which may wait behind the one that runs
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse data, and refuse a head that is too large (called by asyncio)."""
        self._unparsed += len(data)
        began_before = self._in_head
        super().data_received(data)
        if self._in_head and not began_before:
            self._wait()
        if self._unparsed > self._limits.header_bytes and not self.transport.is_closing():
            self._refuse_head()

    def pause_writing(self) -> None:
        """Limit the time in which the client does not read its answers (called by asyncio)."""
        super().pause_writing()
        self._all.wait(self, self._limits.stalled_seconds)

    def resume_writing(self) -> None:
        """Record that the client reads its answers again (called by asyncio)."""
        super().resume_writing()
        self._wait()

    def on_message_begin(self) -> None:
        """Begin to read the head of a request (called by the parser)."""
        super().on_message_begin()
        self._in_head, self._unparsed = True, 0

    def on_headers_complete(self) -> None:
        """Answer the request, unless its head is too large or too many wait (called by the parser)."""
        self._in_head, self._unparsed, self.has_whole_body = False, 0, False
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > self._limits.header_bytes or len(self.headers) > self._limits.header_fields:
            self._refuse_head()
            raise RefusedHead
        if len(self.pipeline) >= self._limits.pipelined:
            self._all.counts["pipelined_too_many"] += 1
            self.close()
            raise RefusedHead
        if not self.flow.write_paused:
            self._all.forget(self)
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # an extension of ours
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # else it asks for a WebSocket
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body (called by the parser)."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request is complete (called by the parser)."""
        super().on_message_complete()
        self._unparsed, self.has_whole_body = 0, True
        if self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:  # type: ignore[redundant-expr]
            self.cycle.more_body = False  # it was answered before its body was there
            self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one's body (called by uvicorn)."""
        self._unanswered.popleft()
        super().on_response_complete()
        self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, unless it was answered already (called by uvicorn)."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def timeout_keep_alive_handler(self) -> None:
        """No effect: `Connections.sweep` has one deadline for all kinds of waiting."""

    @property
    def flushed(self) -> bool:
        """Return whether the client has read everything sent to it."""
        return not self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection without an answer."""
        self.connections.discard(self)
        self.transport.abort()

    def expire(self) -> None:
        """Close the connection, with 408 if a part of a request's head has arrived."""
        if not self.flushed:
            self._all.counts["answer_not_taken"] += 1
            self.close()
        elif self._in_head:
            self._all.counts["headers_late"] += 1
            self._refuse(408, "the headers of the request did not come in time")
        else:
            begun = self.cycle is not None and not self.cycle.more_body  # type: ignore[redundant-expr]
            self._all.counts["idle_too_long" if begun else "headers_late"] += 1
            self.close()

    def _wait(self) -> None:
        """Record what the client must send next, and the deadline."""
        if self.flow.write_paused:
            return  # `pause_writing` has set the deadline
        if self.transport.is_closing():
            if not self.flushed:
                self._all.wait(self, self._limits.stalled_seconds)
        elif self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]
            self._all.forget(self)
        elif self._in_head or self.cycle is None or self.cycle.more_body:  # type: ignore[redundant-expr]
            self._all.wait(self, self._limits.header_seconds)
        else:
            self._all.wait(self, self._limits.idle_seconds)

    def _refuse_head(self) -> None:
        self._all.counts["headers_too_large"] += 1
        limits = self._limits
        self._refuse(431, f"the headers are over {limits.header_bytes} bytes or {limits.header_fields} fields")

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an answer unless the application is in the middle of one."""
        reads = self.flushed
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
            again = b"retry-after: 1\r\n" if status == 503 else b""
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n" + again
            body = message.encode()
            self.transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body))
        self.connections.discard(self)
        if reads:
            self.transport.close()
        else:  # a graceful close would wait for the client
            self.transport.abort()


async def until_disconnect(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects. A request that `LimitedProtocol` has not
    received has no connection that could be lost. Raises ClientDisconnect: the client disconnected before `work` was
    finished.
    """
    connection = scope.get(CONNECTION)
    if connection is None:
        return await work
    if connection.lost:
        work.close()
        raise ClientDisconnect
    caller = asyncio.current_task()
    assert caller is not None
    cancelled_before = caller.cancelling()
    connection.flow.resume_reading()  # uvicorn pauses it for a long body, and a paused socket does not say that it ends
    mine = connection.on_lost = caller.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if connection.lost and caller.uncancel() <= cancelled_before:
            raise ClientDisconnect from None
        raise
    finally:
        if connection.on_lost is mine:  # else of the next request on this connection
            connection.on_lost = None


class ServedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that drops a dead client, and does not log client errors.

    uvicorn's waits until the client reads, and logs refused clients and invalid UTF-8 as errors.
    """

    def keepalive_timeout(self) -> None:
        """Close the connection immediately (called by uvicorn)."""
        super().keepalive_timeout()
        self.transport.abort()

    async def send(self, message: Any) -> None:
        """Send the application's message; a refusal ends the handshake (called by uvicorn)."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Pass on a message, or close the connection if a text is invalid UTF-8 (called by uvicorn)."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
