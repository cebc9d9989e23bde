"""HTTP/1.1 over one connection: uvicorn's protocol, with limits on what comes before a request is understood."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from palestra.http.connections import LOG_SECONDS, Connections

CONNECTION = "palestra.connection"  # where the scope of a request has its `LimitedProtocol`


class _Seldom(logging.Filter):
    """Lets a warning pass once in `LOG_SECONDS`: a client can cause them without a key. Errors always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
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

    A client that sends many requests before it takes their answers is cut off: each of them is held in memory, and
    uvicorn reads more of them whenever one is answered.
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
        self.known = False  # a request of this connection had a good key
        self._all, self._limits = connections, connections.limits
        self._in_head = False
        self._complete = True  # the last request has been received to its end
        self._head_bytes = self._head_fields = 0  # of the request's line, its headers and its trailers, as parsed
        self._unparsed = 0  # bytes since the parser last saw something begin or end: a head, or a piece of a body
        self._refused = False

    # asyncio's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._all.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._refused:
            return
        self._all.began(self)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self._limits.header_bytes and not self.transport.is_closing():
            self._refuse_head()

    def pause_writing(self) -> None:
        """See asyncio."""
        super().pause_writing()
        self._all.stalled(self)

    def resume_writing(self) -> None:
        """See asyncio."""
        super().resume_writing()
        self._all.resumed(self)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
        self._all.began(self)  # again: what has come may have ended another request before
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # an extension of ours
        self._in_head, self._complete = True, False
        self._head_bytes = self._head_fields = self._unparsed = 0

    def on_url(self, url: bytes) -> None:
        """A part of the request's path."""
        self._head_bytes += len(url)
        if self._head_fits:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, after the body."""
        self._head_bytes += len(name) + len(value)
        self._head_fields += 1
        if self._head_fits and self._in_head:  # trailers are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of the request is there."""
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
        """A piece of the body."""
        self._unparsed = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there to its end."""
        self._complete, self._unparsed = True, 0
        if self._refused:
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body was there
            self._all.received(self)

    # uvicorn's

    def on_response_complete(self) -> None:
        """A response has been sent."""
        waits = not self.pipeline
        super().on_response_complete()
        if waits and not self.transport.is_closing():
            self._all.answered(self, self.known, self._complete)

    def timeout_keep_alive_handler(self) -> None:
        """Leave it to `Connections.sweep`, which has one deadline for all kinds of waiting."""

    # `Connection`

    @property
    def flushed(self) -> bool:
        """See `Connection`."""
        return not self.transport.get_write_buffer_size()

    def close_idle(self) -> None:
        """See `Connection`."""
        self._refused = True
        self.transport.abort()

    def expire(self) -> None:
        """See `Connection`."""
        if self._in_head:
            self._answer(408, "the headers of the request did not come in time")
        else:
            self.close_idle()

    @property
    def _head_fits(self) -> bool:
        return self._head_bytes <= self._limits.header_bytes and self._head_fields <= self._limits.header_fields

    def _refuse_head(self) -> None:
        if self._refused:
            return
        self._all.counts["headers_too_large"] += 1
        self._all.closed(self)
        limits = self._limits
        self._answer(431, f"the headers are over {limits.header_bytes} bytes or {limits.header_fields} fields")

    def _answer(self, status: int, message: str) -> None:
        """Answer without the application, which may be in the middle of another response, and close."""
        self._refused = True
        answering = self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]
        if not answering:
            self.transport.write(refusal(status, message))
        if self.flushed:
            self.transport.close()
        else:  # the client does not read
            self.transport.abort()


def refusal(status: int, message: str) -> bytes:
    """A whole response after which the connection is closed."""
    again = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n" + again
    body = message.encode()
    return b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body)
