"""The stream of a page: events and progress of all its runs. What is new in a run is read once for all streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from palestra.dashboard.progress import describe_run
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import ends_of_events, read_events_after
from palestra.errors import PalestraError, TooManyRequests
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, POLL_SECONDS, News, encode_event

# Between two looks at a run's store. A stream asks every `POLL_SECONDS`, which is a little more, so that a look is due
# then, or was made for another stream since.
LOOK_SECONDS = 0.8 * POLL_SECONDS
EVENTS = 500  # of one look, and those that are kept for streams that are a little behind
FIRST_SECONDS = 5.0  # what a stream waits at its beginning for a run that is slow to read
PATIENCE_SECONDS = 1.0  # and later, because its other runs have news too
MOST_STREAMS = 32  # of a server; a page holds one
REPLACED = "replaced"  # kind of the event that says that another run has the folder; it has no number
FAILED_SECONDS = 5.0  # pause before a run that can't be read is looked at again
LINE_SECONDS = 3.0  # between two readings of how far a run is
LINE_SHARE = 0.005  # of a core: the most that these readings take of a run that is slow to read
LINE = "run"  # type of the events that say how far a run is; they have no number


class FeedNews(NamedTuple):
    """What a feed has for one stream.

    Attributes:
        events: numbers and encoded events, in order.
        over: whether the run had ended before it was looked at, so that no more events come.
        replaced: whether another run has the folder now, so that the numbers that the stream has are of no use.
        line: how far the run is, encoded; empty: not known yet.
    """

    events: Sequence[tuple[int, bytes]]
    over: bool
    replaced: bool = False
    line: bytes = b""


class Feed:
    """The newest events of a run, read once for all streams. A stream that is further behind reads older ones itself.

    Attributes:
        run: whose events they are.
        generation: how often another run has taken the folder.
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
        self.generation = 0
        self._begun: tuple[int, ...] = ()
        self._first: float | None = None  # time of the run's first event
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
        try:
            if last > self._newest and last > (await self._ends())[1]:
                return FeedNews([], False, replaced=True)
            if last >= self._start:
                return self._news(last)
            return FeedNews(await self._read(last), False)
        except PalestraError:
            self._fail()
            return FeedNews([], False)

    def known(self, last: int) -> FeedNews | None:
        """Return what `after` would without waiting; None: the store has to be read."""
        if self._failed or self._looking is not None or self._is_due or self._start is None:
            return None
        if not self._start <= last <= self._newest:
            return None
        return self._news(last)

    def _news(self, last: int) -> FeedNews:
        return FeedNews([one for one in self._recent if one[0] > last], self._over, line=self._line)

    @property
    def _is_due(self) -> bool:
        return time.monotonic() >= self._due or self._stopping.is_set()

    async def _look(self) -> None:
        """Read what is new, unless nothing was written since the last look."""
        try:
            over, seen = self._stopping.is_set() or not self.run.in_use(), self.run.seen
            if self._failed or seen != self._seen:
                newest = await self._reader.read(self.run, self.run.newest_event)
                known = self._start is not None and newest == self._newest and self.run.begun == self._begun
                if not known:
                    await self._read_new()
                self._seen = seen
            if time.monotonic() >= self._line_due or (over and not self._over):
                await self._read_line()
            self._over, self._failed, self._due = over, False, time.monotonic() + LOOK_SECONDS
        except PalestraError:  # the list of runs says what is wrong with it
            self._fail()
        finally:
            self._looking = None

    def _fail(self) -> None:
        self._failed, self._due = True, time.monotonic() + FAILED_SECONDS

    @property
    def _newest(self) -> int:
        return self._recent[-1][0] if self._recent else self._start or 0

    async def _ends(self) -> tuple[float | None, int]:
        return await self._reader.read(self.run, lambda: ends_of_events(self.run))

    async def _read_new(self) -> None:
        begun = self.run.begun
        if self._start is None or begun != self._begun:
            first, newest = await self._ends()
            if self._start is not None and first != self._first:
                self.generation += 1
            self._recent.clear()
            self._start, self._first, self._begun = newest, first, begun
        while True:
            found = await self._read(self._newest)
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
        self._reader, self._stopping = reader, stopping
        self._feeds: dict[str, Feed] = {}
        self._open: Counter[str] = Counter()  # by owner
        self._users: Counter[str] = Counter()  # streams by name of a run

    def answer(self, content: AsyncIterator[bytes], names: Collection[str], owner: str = "") -> StreamingResponse:
        """Return the answer that is a stream.

        Args:
            content: of the stream.
            names: of its runs.
            owner: tenant whose streams are counted together; "": a server without tenants.

        Raises:
            TooManyRequests: the owner has as many streams as it may.
        """
        if self._open[owner] >= MOST_STREAMS:
            raise TooManyRequests(
                f"{MOST_STREAMS} streams of this page are open, and there may not be more; close other windows with it",
                retry_after_seconds=5.0,
            )
        return _Counted(self, content, names, owner)

    @contextlib.contextmanager
    def counted(self, names: Collection[str], owner: str) -> Iterator[None]:
        """Count a stream of an owner as open, and keep the feeds of its runs until it is closed."""
        self._open[owner] += 1
        self._users.update(names)
        try:
            yield
        finally:
            self._open[owner] -= 1
            self._users.subtract(names)
            for name in names:
                if self._users[name] == 0:
                    del self._users[name]
                    self._feeds.pop(name, None)
            if self._open[owner] == 0:
                del self._open[owner]

    def _feed(self, name: str) -> Feed:
        """Return the feed of a run, which is made when its first stream begins."""
        if name not in self._feeds:
            self._feeds[name] = Feed(self._reader.run(name), self._reader, self._stopping)
        return self._feeds[name]

    def look(
        self, after: Mapping[str, int], check: Callable[[], Awaitable[None]]
    ) -> Callable[[], Awaitable[News | None]]:
        """Return a function that returns what is new in some runs, or None once the key is void.

        Args:
            after: number of the newest event that the client has, by name of the run.
            check: raises a PalestraError once the client may not read on.
        """
        positions, generations = dict(after), dict[str, int]()
        lines: dict[str, bytes] = {}  # that were sent, by name of the run

        async def look() -> News | None:
            first = not generations
            try:
                await check()
            except PalestraError:
                return None
            found = await self._found(positions, first)
            chunks: list[bytes] = []
            for name, news in zip(tuple(positions), found, strict=True):
                generation = self._feed(name).generation
                if news.replaced or generations.setdefault(name, generation) != generation:
                    chunks.append(encode_event(orjson.dumps({"run": name, "kind": REPLACED}), REPLACED))
                    del positions[name]
                    continue
                if news.events:
                    positions[name] = news.events[-1][0]
                chunks += [chunk for _, chunk in news.events]
                if news.line and news.line != lines.get(name):
                    chunks.append(news.line)
                    lines[name] = news.line
            return News(chunks, all(news.over for news in found))

        return look

    async def _found(self, positions: Mapping[str, int], first: bool) -> Sequence[FeedNews]:
        """Return the news of each run; nothing is waited for where all were read a moment ago."""
        if not first:
            known = [self._feed(name).known(last) for name, last in positions.items()]
            if (ready := [news for news in known if news is not None]) and len(ready) == len(known):
                return ready
        return await asyncio.gather(*(self._feed(name).after(last, first) for name, last in positions.items()))


class _Counted(StreamingResponse):
    """A stream that counts as open until its client has gone, also where the client reads nothing of it."""

    def __init__(self, streams: Streams, content: AsyncIterator[bytes], names: Collection[str], owner: str) -> None:
        super().__init__(content, 200, AS_IT_COMES, MEDIA_TYPE)
        self._streams, self._names, self._owner = streams, list(names), owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (called by the server)."""
        with self._streams.counted(self._names, self._owner):
            await super().__call__(scope, receive, send)
