"""News of a run, read once for all streams: one task polls the run's store, and wakes the followers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

import orjson

from palestra.dashboard.progress import describe_run
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import ends_of_events
from palestra.errors import PalestraError
from palestra.http.sse import encode_event
from palestra.store.run_log import read_events
from palestra.waiting import race

LOOK_SECONDS = 0.5  # between two looks at a run's store
EVENTS = 500  # of one look, and those that are kept for streams that are a little behind
FIRST_SECONDS = 5.0  # what a stream waits at its beginning for a run that is slow to read
LAST_SECONDS = 1.0  # and a server at its end, for the events that were written just before
FAILED_SECONDS = 5.0  # pause before a run that can't be read is looked at again
LINE_SECONDS = 3.0  # between two readings of how far a run is
LINE_SHARE = 0.002  # of a core: the most that these readings take
LINE = "run"  # type of the events that say how far a run is; they have no number


class FeedNews(NamedTuple):
    """A feed's news for one stream.

    Attributes:
        over: whether the run had ended before the read, so that no more events come.
        replaced: whether another run now has the folder, so that the stream's event numbers are invalid.
        line: the run's progress, encoded; empty: unknown.
    """

    events: Sequence[tuple[int, bytes]]
    over: bool
    replaced: bool = False
    line: bytes = b""


class Feed:
    """The newest events of a run, and its progress. A stream that lags behind reads older events itself.

    Attributes:
        generation: how often another run has taken the folder.
    """

    def __init__(self, run: Run, reader: Reader, stopping: asyncio.Event) -> None:
        self.run, self._reader, self._stopping = run, reader, stopping
        self._recent: deque[tuple[int, bytes]] = deque()
        self._start: int | None = None  # all events after this number are in `_recent`
        self._looking: asyncio.Task[None] | None = None
        self._failed = False
        self._seen: tuple[int, ...] = ()
        self._over = False
        self.generation = 0
        self._begun: tuple[int, ...] = ()
        self._first: float | None = None  # time of the run's first event
        self._line = b""
        self._line_due = 0.0
        self._followers: set[asyncio.Event] = set()
        self._watching: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def followed(self, news: asyncio.Event) -> Iterator[None]:
        """Poll the run while the block is open."""
        self._followers.add(news)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._followers.remove(news)
            if not self._followers:
                self._watching.cancel()
                self._watching = None

    async def after(self, last: int, first: bool) -> FeedNews:
        """Return up to `EVENTS` events after a number; empty while the run cannot be read. `first`: whether the stream
        has just begun, so that everything in the store must be read now.
        """
        if first and not self._failed:
            await self._look_again(FIRST_SECONDS)
        if self._failed or self._start is None:
            return FeedNews([], self._over)
        try:
            if last > self._newest and last > (await self._ends())[1]:
                return FeedNews([], False, replaced=True)
            if last >= self._start:
                return FeedNews([one for one in self._recent if one[0] > last], self._over, line=self._line)
            return FeedNews(await self._read(last), False)
        except PalestraError:
            self._fail()
            return FeedNews([], False)

    async def _watch(self) -> None:
        """Poll the run until the server ends, and once more then. Each stream makes the first poll itself."""
        while not await self._pause(FAILED_SECONDS if self._failed else LOOK_SECONDS):
            await race(asyncio.wait({self._look_now()}), self._stopping.wait())
        await self._look_again(LAST_SECONDS)
        self._over = True  # also where the last look takes longer
        self._wake()

    async def _pause(self, seconds: float) -> bool:
        """Wait; return whether the server ends, which ends the wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _wake(self) -> None:
        for news in self._followers:
            news.set()

    async def _look_again(self, seconds: float) -> None:
        """Start another poll, which sees everything in the store now, and wait for it."""
        if self._looking is not None:  # which may have read the store before its newest event was written
            await asyncio.wait({self._looking}, timeout=seconds)
        await asyncio.wait({self._look_now()}, timeout=seconds)

    def _look_now(self) -> asyncio.Task[None]:
        """Return the running poll, or a new one."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        """Read news if the store was written since the last poll; wake the followers if there are any."""
        before = self._state
        try:
            over, seen = self._is_over, self.run.seen
            if self._failed or seen != self._seen:
                newest = await self._reader.read(self.run, self.run.newest_event)
                known = self._start is not None and newest == self._newest and self.run.begun == self._begun
                if not known:
                    await self._read_new()
                self._seen = seen
            if time.monotonic() >= self._line_due or (over and not self._over):
                await self._read_line()
            self._over, self._failed = over, False
        except PalestraError:  # the list of runs says what is wrong with it
            self._fail()
        finally:
            self._looking = None
        if self._state != before:
            self._wake()

    @property
    def _state(self) -> tuple[object, ...]:
        return self._newest, self.generation, self._line, self._over

    def _fail(self) -> None:
        self._failed, self._over = True, self._is_over

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() or not self.run.in_use()

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
    with run.open() as connection:
        found = read_events(connection, last, EVENTS)
    # The kind stands in the data too: one that is damaged could be any text, and the field is one line.
    kinds = (one.kind if one.kind.isidentifier() else "event" for one in found)
    encoded = (orjson.dumps({**asdict(one), "run": run.name}) for one in found)
    return [(one.event_id, encode_event(data, kind)) for one, kind, data in zip(found, kinds, encoded, strict=True)]
