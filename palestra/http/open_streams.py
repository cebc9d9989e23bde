"""Streams, counted by who reads them, so that no reader takes all connections of a server and all of its time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import AbstractContextManager

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from palestra.errors import TooManyRequests


class OpenStreams:
    """The open streams of a server."""

    def __init__(self, most: int, refusal: str) -> None:
        """Begin without streams.

        Args:
            most: limit of one reader's streams.
            refusal: message for exceeding it, without the number.
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
        """Return a streaming response.

        Args:
            during: entered while the stream is open; None: nothing.

        Raises:
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
