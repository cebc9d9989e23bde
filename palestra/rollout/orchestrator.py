"""Many episodes at once, from a stream of work to batches of results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from palestra.waiting import race

W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[W, R]):
    """What became of one piece of work: a result, or the error that it ended with."""

    work: W
    result: R | None = None
    error: Exception | None = None


class RolloutOrchestrator(Generic[W, R]):
    """Plays pieces of work side by side; whoever reads the results slowly slows it down, and loses none."""

    def __init__(
        self,
        play: Callable[[W], Awaitable[R]],
        *,
        max_concurrency: int,
        max_waiting_results: int | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Args:
        play: plays one piece of work; an Exception of it is an outcome, and not the end.
        max_concurrency: pieces that are played at once.
        max_waiting_results: results that may wait to be read; None: as many as `max_concurrency`.
        timeout_seconds: of one piece, which is cancelled then; None: none.
        """
        if max_concurrency < 1:
            raise ValueError("max_concurrency is at least 1")
        self._play, self._timeout_seconds = play, timeout_seconds
        self._concurrency = max_concurrency
        self._results: asyncio.Queue[Outcome[W, R]] = asyncio.Queue(max_waiting_results or max_concurrency)
        self._over = asyncio.Event()
        self.counts: Counter[str] = Counter()  # done, failed, timed_out

    @property
    def waiting(self) -> int:
        """Results that nobody has read."""
        return self._results.qsize()

    async def run_producers_from_stream(self, stream: Iterable[W] | AsyncIterable[W]) -> None:
        """Play all of a stream; returns when every result is in the queue, and then ends `yield_batches`.

        Cancelled, it ends what is being played, and `yield_batches` with it.

        Raises:
            Exception: what the stream raised.
        """
        work = _iterator(stream)
        taking = asyncio.Lock()

        async def producer() -> None:
            while True:
                async with taking:
                    try:
                        piece = await anext(work)
                    except StopAsyncIteration:
                        return
                await self._results.put(await self._outcome(piece))

        try:
            async with asyncio.TaskGroup() as producers:
                for _ in range(self._concurrency):
                    producers.create_task(producer())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._over.set()  # without waiting: nobody may be reading

    async def yield_batches(self, size: int) -> AsyncIterator[list[Outcome[W, R]]]:
        """Outcomes as they come, in lists of `size`; the last one may be shorter."""
        batch: list[Outcome[W, R]] = []
        while (outcome := await self._next()) is not None:
            batch.append(outcome)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch

    async def _next(self) -> Outcome[W, R] | None:
        """The next outcome; None: nothing more will come."""
        if self._results.empty() and not self._over.is_set():
            winner = await race(self._results.get(), self._over.wait())
            if winner.index == 0:
                return cast("Outcome[W, R]", winner.result)
        return None if self._results.empty() else self._results.get_nowait()

    async def _outcome(self, piece: W) -> Outcome[W, R]:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                result = await self._play(piece)
        except Exception as error:  # noqa: BLE001 - the caller's, and handed to whoever reads
            self.counts["timed_out" if limit.expired() else "failed"] += 1
            return Outcome(work=piece, error=error)
        self.counts["done"] += 1
        return Outcome(work=piece, result=result)


async def _iterator(stream: Iterable[W] | AsyncIterable[W]) -> AsyncIterator[W]:
    if isinstance(stream, AsyncIterable):
        async for piece in stream:
            yield piece
    else:
        for piece in stream:
            yield piece
