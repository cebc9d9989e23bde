"""Server-sent events: how one is encoded, and the loop behind streams that follow a job or an episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from palestra.errors import TooManyRequests

POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0  # proxies close connections that are silent for a minute
MEDIA_TYPE = "text/event-stream; charset=utf-8"
AS_IT_COMES = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies must not buffer a stream
# In JSON these stand in texts only. Clients that split as Python's `str.splitlines` would end the event at one.
_LINE_ENDS = {c.encode(): rf"\u{ord(c):04x}".encode() for c in "\x85\u2028\u2029"}
_KEEPALIVE = b": still here\n\n"  # a comment of the format, which clients skip


def encode_event(data: bytes, event: str | None = None, event_id: str | None = None) -> bytes:
    """Return one server-sent event.

    Args:
        data: on one line, like `orjson`'s JSON.
        event: type; None: `message`.
        event_id: sent as `Last-Event-ID` by a client that reconnects.
    """
    head = b"" if event_id is None else b"id: " + event_id.encode() + b"\n"
    if event is not None:
        head += b"event: " + event.encode() + b"\n"
    for character, escaped in _LINE_ENDS.items():
        data = data.replace(character, escaped)
    return head + b"data: " + data + b"\n\n"


class News(NamedTuple):
    """The result of one poll.

    Attributes:
        chunks: encoded events to send, in order.
        over: whether the source had ended before the poll, so that a poll without chunks is the last one.
    """

    chunks: Sequence[bytes]
    over: bool


async def follow(
    look: Callable[[], Awaitable[News | None]],
    wait: bool,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    keepalive: bool = True,
    every: float = POLL_SECONDS,
) -> AsyncIterator[bytes]:
    """Yield the results of polls until the source has ended.

    Args:
        look: returns news since its last call; None: the client has lost access.
        wait: whether to wait for future events; False: end when there is nothing more to send now.
        pause: returns after so many seconds, or earlier if a poll makes sense.
        keepalive: whether to send a comment after `KEEPALIVE_SECONDS` without events.
        every: longest pause between two polls, in seconds.
    """
    quiet = 0.0
    while (news := await look()) is not None:
        for chunk in news.chunks:
            yield chunk
        if news.chunks:
            quiet = 0.0
            continue
        if news.over or not wait:
            return
        await pause(every)
        quiet += every
        if keepalive and quiet >= KEEPALIVE_SECONDS:
            quiet = 0.0
            yield _KEEPALIVE


class OpenStreams:
    """The open streams of a server."""

    def __init__(self, most: int, refusal: str) -> None:
        """Begin without streams. `most`: limit of one reader's streams. `refusal`: message for exceeding it, without
        the number.
        """
        self._most, self._refusal = most, refusal
        self.open: Counter[Hashable] = Counter()  # by reader

    def answer(
        self,
        content: AsyncIterator[bytes],
        reader: Hashable,
        headers: Mapping[str, str],
        media_type: str,
        during: AbstractContextManager[object] | None = None,
    ) -> StreamingResponse:
        """Return a streaming response. `during` is entered while the stream is open. Raises
        TooManyRequests: the reader has too many streams.
        """
        if self.open[reader] >= self._most:
            raise TooManyRequests(f"{self._most} {self._refusal}", retry_after_seconds=5.0)
        return _Counted(self.open, reader, content, headers, media_type, during or contextlib.nullcontext())


class _Counted(StreamingResponse):
    """A stream that counts as open until its client disconnects, even if the client reads nothing."""

    def __init__(
        self,
        counts: Counter[Hashable],
        reader: Hashable,
        content: AsyncIterator[bytes],
        headers: Mapping[str, str],
        media_type: str,
        during: AbstractContextManager[object],
    ) -> None:
        super().__init__(content, 200, headers, media_type)
        self._counts, self._reader, self._during = counts, reader, during

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (called by the server)."""
        self._counts[self._reader] += 1
        try:
            with self._during:
                await super().__call__(scope, receive, send)
        finally:
            self._counts[self._reader] -= 1
            if not self._counts[self._reader]:
                del self._counts[self._reader]
