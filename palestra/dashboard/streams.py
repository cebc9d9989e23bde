"""The stream of a page: events and progress of all its runs. What is new in a run is read once for all streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from palestra.dashboard.progress import describe_run
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import newest_event, read_events_after
from palestra.errors import PalestraError, TooManyRequests
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, POLL_SECONDS, News, encode_event

# Between two looks at a run's store. A stream asks every `POLL_SECONDS`, which is a little more, so that a look is due
# then, or was made for another stream since.
LOOK_SECONDS = 0.8 * POLL_SECONDS
EVENTS = 500  # of one look, and those that are kept for streams that are a little behind
FIRST_SECONDS = 5.0  # what a stream waits at its beginning for a run that is slow to read
PATIENCE_SECONDS = 1.0  # and later, because its other runs have news too
MOST_STREAMS = 32  # of a server; a page holds one
FAILED_SECONDS = 5.0  # pause before a run that can't be read is looked at again
LINE_SECONDS = 3.0  # between two readings of how far a run is
LINE_SHARE = 0.005  # of a core: the most that these readings take of a run that is slow to read
LINE = "run"  # type of the events that say how far a run is; they have no number


class FeedNews(NamedTuple):
    """What a feed has for one stream.

    Attributes:
        events: numbers and encoded events, in order.
        over: whether the run had ended before it was looked at, so that no more events come.
        line: how far the run is, encoded; empty: not known yet.
    """

    events: Sequence[tuple[int, bytes]]
    over: bool
    line: bytes = b""


class Feed:
    """The newest events of a run, read once for all streams. A stream that is further behind reads older ones itself.

    Attributes:
        run: whose events they are.
    """

    def __init__(self, run: Run, reader: Reader, stopping: asyncio.Event) -> None:
        self.run, self._reader, self._stopping = run, reader, stopping
        self._recent: deque[tuple[int, bytes]] = deque()
        self._start: int | None = None  # all events after this number are in `_recent`
        self._looking: asyncio.Task[None] | None = None
        self._due = -math.inf
        self._failed = False
        self._seen: tuple[int, ...] = ()
        self._over = False
        self._line = b""
        self._line_due = -math.inf

    async def after(self, last: int, first: bool) -> FeedNews:
        """Return the events after a number, up to `EVENTS` of them; none while the run can't be read.

        Args:
            last: number of the newest event that the stream has sent.
            first: whether the stream has just begun, so that all that is in the store now has to be seen.
        """
        patience = FIRST_SECONDS if first else PATIENCE_SECONDS
        if first and self._looking is not None:  # which may have read the store before its newest event was written
            await asyncio.wait({self._looking}, timeout=patience)
        if self._looking is None and (self._is_due or (first and not self._failed)):
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=patience)
        if self._failed or self._looking is not None or self._start is None:
            return FeedNews([], self._stopping.is_set() or (self._failed and not self.run.in_use()))
        if last >= self._start:
            return self._news(last)
        try:
            return FeedNews(await self._read(last), False)
        except PalestraError:
            self._fail()
            return FeedNews([], False)

    def known(self, last: int) -> FeedNews | None:
        """Return what `after` would without waiting; None: the store has to be read."""
        if self._failed or self._looking is not None or self._is_due or self._start is None or last < self._start:
            return None
        return self._news(last)

    def _news(self, last: int) -> FeedNews:
        return FeedNews([one for one in self._recent if one[0] > last], self._over, self._line)

    @property
    def _is_due(self) -> bool:
        return time.monotonic() >= self._due or self._stopping.is_set()

    async def _look(self) -> None:
        """Read what is new, unless nothing was written since the last look."""
        try:
            over, seen = self._stopping.is_set() or not self.run.in_use(), self.run.seen
            if self._failed or seen != self._seen:
                newest = await self._reader.read(self.run, self.run.newest_event)
                if newest is None or newest != self._newest:
                    await self._read_new()
                self._seen = seen
            if time.monotonic() >= self._line_due or (over and not self._over):
                await self._read_line()
            self._over, self._failed, self._due = over, False, time.monotonic() + LOOK_SECONDS
        except PalestraError:  # the list of runs says what is wrong with it
            self._fail()
        finally:
            self._looking = None

    @property
    def _newest(self) -> int | None:
        """Return the number of the newest event that was read; None: none was read yet."""
        return self._recent[-1][0] if self._recent else self._start

    def _fail(self) -> None:
        self._failed, self._due = True, time.monotonic() + FAILED_SECONDS

    async def _read_new(self) -> None:
        if self._start is None:
            self._start = await self._reader.read(self.run, lambda: newest_event(self.run))
        while True:
            found = await self._read(self._newest or 0)
            self._recent.extend(found)
            while len(self._recent) > EVENTS:
                self._start = self._recent.popleft()[0]
            if len(found) < EVENTS:
                return

    async def _read_line(self) -> None:
        began = time.monotonic()
        found = await self._reader.read(self.run, lambda: describe_run(self.run))
        self._line = encode_event(found.model_dump_json().encode(), LINE)
        now = time.monotonic()
        self._line_due = now + max(LINE_SECONDS, (now - began) / LINE_SHARE)

    async def _read(self, last: int) -> list[tuple[int, bytes]]:
        return await self._reader.read(self.run, lambda: _encoded(self.run, last))


def _encoded(run: Run, last: int) -> list[tuple[int, bytes]]:
    """Return the events after a number, each with its number."""
    found = read_events_after(run, last, EVENTS)
    # The kind stands in the data too: one that is damaged could be any text, and the field is one line.
    return [
        (one.event_id, encode_event(one.model_dump_json().encode(), one.kind if one.kind.isidentifier() else "event"))
        for one in found
    ]


class Streams:
    """The streams of a server, and the feeds behind them."""

    def __init__(self, reader: Reader, stopping: asyncio.Event) -> None:
        self._feeds = {run.name: Feed(run, reader, stopping) for run in reader.runs.values()}
        self._open = 0

    def answer(self, content: AsyncIterator[bytes]) -> StreamingResponse:
        """Return the answer that is a stream.

        Args:
            content: of the stream.

        Raises:
            TooManyRequests: the server has as many streams as it may.
        """
        if self._open >= MOST_STREAMS:
            raise TooManyRequests(
                f"{MOST_STREAMS} streams of this page are open, and there may not be more; close other windows with it",
                retry_after_seconds=5.0,
            )
        return _Counted(self, content)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a stream as open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def look(self, after: Mapping[str, int], check: Callable[[], None]) -> Callable[[], Awaitable[News | None]]:
        """Return a function that returns what is new in some runs, or None once the key is void.

        Args:
            after: number of the newest event that the client has, by name of the run.
            check: raises a PalestraError once the client may not read on.
        """
        positions, first = dict(after), True
        lines: dict[str, bytes] = {}  # that were sent, by name of the run

        async def look() -> News | None:
            nonlocal first
            try:
                check()
            except PalestraError:
                return None
            found = await self._found(positions, first)
            first = False
            for name, news in zip(positions, found, strict=True):
                if news.events:
                    positions[name] = news.events[-1][0]
            chunks = [chunk for news in found for _, chunk in news.events]
            for name, news in zip(positions, found, strict=True):
                if news.line and news.line != lines.get(name):
                    chunks.append(news.line)
                    lines[name] = news.line
            return News(chunks, all(news.over for news in found))

        return look

    async def _found(self, positions: Mapping[str, int], first: bool) -> Sequence[FeedNews]:
        """Return the news of each run; nothing is waited for where all were read a moment ago."""
        if not first:
            known = [self._feeds[name].known(last) for name, last in positions.items()]
            if (ready := [news for news in known if news is not None]) and len(ready) == len(known):
                return ready
        return await asyncio.gather(*(self._feeds[name].after(last, first) for name, last in positions.items()))


class _Counted(StreamingResponse):
    """A stream that counts as open until its client has gone, also where the client reads nothing of it."""

    def __init__(self, streams: Streams, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, 200, AS_IT_COMES, MEDIA_TYPE)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (called by the server)."""
        with self._streams.counted():
            await super().__call__(scope, receive, send)
