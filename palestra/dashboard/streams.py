"""The stream of a page: events and progress of all its runs, read once for all streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from weakref import WeakValueDictionary

import orjson
from starlette.responses import StreamingResponse

from palestra.dashboard.feeds import Feed
from palestra.dashboard.reader import Reader
from palestra.errors import PalestraError
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, News, OpenStreams, encode_event, follow
from palestra.waiting import together

MOST_STREAMS = 32  # of a server, or of a tenant where there are several; a page holds one
CHECK_SECONDS = 5.0  # between two looks without news, which find out whether the key is still good
REFUSED = "streams of this page are open, and there may not be more; close other windows with it"
REPLACED = "replaced"  # kind of the event that says that another run has the folder; it has no number


class Stream:
    """A stream's position in several runs."""

    def __init__(
        self, feeds: Mapping[str, Feed], positions: Mapping[str, int], check: Callable[[], Awaitable[None]]
    ) -> None:
        """Begin after some events. `check`: raises a PalestraError once the client has lost access."""
        self._feeds, self._positions, self._check = dict(feeds), dict(positions), check
        self._generations = dict[str, int]()  # of the feeds at the first look; empty: there was none
        self._lines = dict[str, bytes]()  # that were sent, by name of the run
        self._news = asyncio.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Poll the runs, and wake this stream, while the block is open."""
        with contextlib.ExitStack() as stack:
            for feed in self._feeds.values():
                stack.enter_context(feed.followed(self._news))
            yield

    def follow(self, wait: bool = True) -> AsyncIterator[bytes]:
        """Yield news while the stream is open. `wait`: whether to wait for future events, until all runs are over."""
        return follow(self.look, wait, self.pause, every=CHECK_SECONDS)

    async def pause(self, seconds: float) -> None:
        """Wait for news, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def look(self) -> News | None:
        """Return news as one chunk; None: the client has lost access."""
        first = not self._generations
        self._news.clear()
        try:
            await self._check()
        except PalestraError:
            return None
        after = [self._feeds[name].after(last, first) for name, last in self._positions.items()]
        found = await together(*after)
        chunks: list[bytes] = []
        for name, news in zip(tuple(self._positions), found, strict=True):
            generation = self._feeds[name].generation
            if news.replaced or self._generations.setdefault(name, generation) != generation:
                chunks.append(encode_event(orjson.dumps({"run": name, "kind": REPLACED}), REPLACED))
                del self._positions[name]
                continue
            if news.events:
                self._positions[name] = news.events[-1][0]
            chunks += [chunk for _, chunk in news.events]
            if news.line and news.line != self._lines.get(name):
                chunks.append(news.line)
                self._lines[name] = news.line
        return News([b"".join(chunks)] if chunks else [], all(news.over for news in found))


class Streams:
    """The streams of a server, with their feeds."""

    def __init__(self, reader: Reader, stopping: asyncio.Event) -> None:
        self._reader, self._stopping = reader, stopping
        self._feeds = WeakValueDictionary[str, Feed]()  # by name of the run; those of streams that are open
        self._open = OpenStreams(MOST_STREAMS, REFUSED)

    def stream(self, after: Mapping[str, int], check: Callable[[], Awaitable[None]]) -> Stream:
        """Return a new stream over some runs. `check`: raises a PalestraError once the client has lost access."""
        return Stream({name: self._feed(name) for name in after}, after, check)

    def answer(self, stream: Stream, content: AsyncIterator[bytes], owner: str = "") -> StreamingResponse:
        """Return the response of a stream. `owner`: tenant whose streams are limited together; "": a server without
        tenants. Raises TooManyRequests if the owner has too many streams.
        """
        return self._open.answer(content, owner, AS_IT_COMES, MEDIA_TYPE, stream.open())

    def _feed(self, name: str) -> Feed:
        """Return the feed of a run, created for its first stream."""
        if (feed := self._feeds.get(name)) is None:
            feed = self._feeds[name] = Feed(self._reader.run(name), self._reader, self._stopping)
        return feed
