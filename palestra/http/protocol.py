"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what arrives before a request is authenticated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from palestra.http.connections import LOG_SECONDS, Connections

CONNECTION = "palestra.connection"  # key in the ASGI scope of a request, whose value is its `LimitedProtocol`


class _Seldom(logging.Filter):
    """Passes one warning in `LOG_SECONDS`, because clients can cause them without a key. Errors always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; see `logging.Filter`."""
        if record.levelno >= logging.ERROR:
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOG_SECONDS
        return True


log = logging.getLogger("palestra.http.protocol")
log.addFilter(_Seldom())


class LimitedProtocol(HttpToolsProtocol):
    """Refuses heads of requests that are too large with 431, and those that do not end in time with 408.

    A client that sends many requests before it reads their answers is disconnected: each of them is held in memory, and
    uvicorn reads more of them whenever one is answered.

    Attributes:
        known: whether a request of this connection had a good key.
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
        self.logger = log
        self.known = False
        self._all, self._limits = connections, connections.limits
        self._in_head = False
        self._complete = True  # whether the last request was received to its end
        self._head_bytes = self._head_fields = 0
        # Bytes since the parser last reported a head or a piece of a body: it reports a header only at its end, so an
        # endless one would otherwise not be counted.
        self._unparsed = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection (called by asyncio)."""
        super().connection_made(transport)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that is closed (called by asyncio)."""
        self._all.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, and refuse a head that is too large (called by asyncio)."""
        if self._refused:
            return
        self._all.began(self)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._limits.header_bytes and not self.transport.is_closing():
            self._refuse_head()

    def pause_writing(self) -> None:
        """Record that the client does not read its answers (called by asyncio)."""
        super().pause_writing()
        self._all.stalled(self)

    def resume_writing(self) -> None:
        """Record that the client reads its answers again (called by asyncio)."""
        super().resume_writing()
        self._all.resumed(self)

    def on_message_begin(self) -> None:
        """Start counting the head of a new request (called by the parser)."""
        self._all.began(self)  # again: what has come may have ended another request before
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # an extension of ours
        self._in_head, self._complete = True, False
        self._head_bytes = self._head_fields = self._unparsed = 0

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's path (called by the parser)."""
        self._head_bytes += len(url)
        if self._head_fits:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer after the body (called by the parser)."""
        self._head_bytes += len(name) + len(value)
        self._head_fields += 1
        if self._head_fits and self._in_head:  # trailers are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer the request, unless its head is too large or too many wait (called by the parser)."""
        self._in_head, self._unparsed = False, 0
        if self._refused:
            return
        if not self._head_fits:
            self._refuse_head()
            return
        if len(self.pipeline) >= self._limits.pipelined:
            self._all.counts["pipelined_too_many"] += 1
            self.close_idle()
            return
        self._all.answering(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on (called by the parser)."""
        self._unparsed = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request was received to its end (called by the parser)."""
        self._complete, self._unparsed = True, 0
        if self._refused:
            return
        super().on_message_complete()
        # There is no cycle if the first request is one for a WebSocket.
        answered = self.cycle is not None and self.cycle.response_complete  # type: ignore[redundant-expr]
        if answered:  # before its body was there
            self._all.received(self)

    def on_response_complete(self) -> None:
        """Record that a response was sent, so that the connection waits for the next request (called by uvicorn)."""
        waits = not self.pipeline
        super().on_response_complete()
        if waits and not self.transport.is_closing():
            self._all.answered(self, self.known, self._complete)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to a WebSocket, and count it until that ends (called by uvicorn)."""
        self._all.answering(self)
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        assert isinstance(websocket, CountedWebSocket)
        websocket.ended = partial(self._all.closed, self)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: `Connections.sweep` has one deadline for all kinds of waiting."""

    @property
    def flushed(self) -> bool:
        """Return whether the client has read everything that was sent to it; see `Connection`."""
        return not self.transport.get_write_buffer_size()

    def close_idle(self) -> None:
        """Close the connection without an answer; see `Connection`."""
        self._refused = True
        self.transport.abort()

    def expire(self) -> None:
        """Close the connection, with 408 if the head of a request has arrived in part; see `Connection`."""
        if self._in_head:
            self._answer(408, "the headers of the request did not come in time")
        else:
            self.close_idle()

    @property
    def _head_fits(self) -> bool:
        """Return whether the head of the present request is within the limits, as far as it has arrived."""
        return self._head_bytes <= self._limits.header_bytes and self._head_fields <= self._limits.header_fields

    def _refuse_head(self) -> None:
        """Answer 431 and close the connection, once."""
        if self._refused:
            return
        self._all.counts["headers_too_large"] += 1
        self._all.closed(self)
        limits = self._limits
        self._answer(431, f"the headers are over {limits.header_bytes} bytes or {limits.header_fields} fields")

    def _answer(self, status: int, message: str) -> None:
        """Answer without the application, which may be in the middle of another response, and close the connection."""
        self._refused = True
        answering = self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]
        if not answering:
            self.transport.write(refusal(status, message))
        if self.flushed:
            self.transport.close()
        else:  # the client does not read, so a graceful close would wait for it
            self.transport.abort()


class CountedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose connection stays counted until it ends.

    Attributes:
        ended: is called when the connection is closed.
    """

    ended: Callable[[], None] | None = None

    def keepalive_timeout(self) -> None:
        """Drop a client that is gone: a graceful close would wait until it reads (called by uvicorn)."""
        super().keepalive_timeout()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that is closed (called by asyncio)."""
        if self.ended is not None:
            self.ended()
        super().connection_lost(exc)


def refusal(status: int, message: str) -> bytes:
    """Return a whole response, as bytes, after which the connection is closed."""
    again = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n" + again
    body = message.encode()
    return b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body)
