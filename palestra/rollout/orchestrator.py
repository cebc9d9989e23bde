"""`RolloutOrchestrator`: plays many episodes concurrently, from a stream of work to batches of results."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from palestra.agents import Agent
from palestra.client.plain_values import checked_amount, checked_count
from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.catalog import adapted
from palestra.envs.concurrent import close_or_log
from palestra.rollout.result import Termination, classify_errors
from palestra.types.clock import Clock
from palestra.waiting import race


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """What to play: agents and environments.

    `environment` creates an environment for an episode; a reusable environment serves several episodes, one after
    another.
    """

    environment: Callable[[], Made]
    agents: Mapping[str, Agent] | None = None  # by name; None: a `ModelAgent` plays every agent
    system: str | None = None  # system message of the agent of an `Environment`; None: the environment's own
    max_tokens: int | None = None  # limit of each reply in tokens, if `agents` is None
    only_judged: bool = False  # whether the job's judge gives all rewards, so that what the environment gives is none
    temperature: float | None = None  # used where the job fixes no temperature: not in training, nor in validation

    def __post_init__(self) -> None:
        """Check the numbers, and adapt environments of other libraries."""
        object.__setattr__(self, "environment", adapted(self.environment))
        if self.max_tokens is not None:
            checked_count("max_tokens", self.max_tokens)
        if self.temperature is not None:
            checked_amount("temperature", self.temperature)


W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOutcome(Generic[W, R]):
    """The end of one piece of work: its result or error."""

    work: W
    result: R | None = None
    error: Exception | None = None


class RolloutOrchestrator(Generic[W, R]):
    """Runs pieces of work concurrently, with backpressure from the reader of the results, which are never lost."""

    def __init__(
        self,
        play: Callable[[W], Awaitable[R]],
        *,
        max_concurrency: int,
        max_waiting_results: int | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Create an orchestrator.

        The exception of `play` becomes an outcome and does not stop the others; a piece of work is cancelled after
        `timeout_seconds`. At most `max_waiting_results` are unread, by default `max_concurrency`.
        """
        if max_concurrency < 1:
            raise ValueError("max_concurrency is at least 1")
        self._play, self._timeout_seconds = play, timeout_seconds
        self._concurrency = max_concurrency
        self._results: asyncio.Queue[WorkOutcome[W, R]] = asyncio.Queue(max_waiting_results or max_concurrency)
        self._over = asyncio.Event()
        self.counts: Counter[str] = Counter()  # done, failed, timed_out

    @property
    def waiting(self) -> int:
        """Return the number of unread results."""
        return self._results.qsize()

    async def run_producers_from_stream(self, stream: Iterable[W] | AsyncIterable[W]) -> None:
        """Run all work of a stream and return when every result is in the queue; `yield_batches` then ends.

        Cancelling it cancels the running work and ends `yield_batches`. The next piece is taken when a worker is free.
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
            # An event, not an entry of the queue: a full queue that has no reader would block here for ever.
            self._over.set()

    async def yield_batches(self, size: int) -> AsyncIterator[list[WorkOutcome[W, R]]]:
        """Yield outcomes in order of arrival, in lists of `size`; the last list may be shorter."""
        batch: list[WorkOutcome[W, R]] = []
        while (outcome := await self._next()) is not None:
            batch.append(outcome)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch

    async def yield_groups(self, size: int, key: Callable[[W], Hashable]) -> AsyncIterator[list[WorkOutcome[W, R]]]:
        """Yield the outcomes of pieces with an equal key together, once there are `size`, in order of completion.

        At the end, groups that have remained smaller follow, in order of their first outcomes.
        """
        groups: dict[Hashable, list[WorkOutcome[W, R]]] = {}
        while (outcome := await self._next()) is not None:
            of = key(outcome.work)
            groups.setdefault(of, []).append(outcome)
            if len(groups[of]) == size:
                yield groups.pop(of)
        for group in groups.values():
            yield group

    async def _next(self) -> WorkOutcome[W, R] | None:
        if self._results.empty() and not self._over.is_set():
            winner = await race(self._results.get(), self._over.wait())
            if winner.index == 0:
                return cast("WorkOutcome[W, R]", winner.result)
        return None if self._results.empty() else self._results.get_nowait()

    async def _outcome(self, piece: W) -> WorkOutcome[W, R]:
        try:
            async with asyncio.timeout(self._timeout_seconds) as limit:
                result = await self._play(piece)
        except Exception as error:  # noqa: BLE001 - the error is the outcome; the reader decides
            self.counts["timed_out" if limit.expired() else "failed"] += 1
            return WorkOutcome(work=piece, error=error)
        self.counts["done"] += 1
        return WorkOutcome(work=piece, result=result)


async def _iterator(stream: Iterable[W] | AsyncIterable[W]) -> AsyncIterator[W]:
    if isinstance(stream, AsyncIterable):
        async for piece in stream:
            yield piece
    else:
        for piece in stream:
            yield piece


log = logging.getLogger("palestra.rollout")
CLOSE_SECONDS = 30.0
Made = Environment | ConcurrentEnvironment


class EnvironmentPool:
    """Provides each running episode with its own environment.

    `setup` is called once per environment, `reset` with every episode, `close` at the end.
    """

    def __init__(self, make: Callable[[], Made], *, system: str | None, clock: Clock) -> None:
        """Create an empty pool. `system` is the system message of the agent of an `Environment`; None: the
        environment's own.
        """
        self._make, self._system, self._clock = make, system, clock
        self._idle: list[Made] = []
        self._kept = False

    def keep(self) -> None:
        """From now on, keep reusable environments until `close`."""
        self._kept = True

    async def close(self) -> None:
        """Close the kept environments."""
        self._kept = False
        idle, self._idle = self._idle, []
        await asyncio.gather(*map(self._close, idle))

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[ConcurrentEnvironment]:
        """Provide an environment for one episode while the block is open."""
        made = self._idle.pop() if self._idle else None
        usable = False
        try:
            with classify_errors(Termination.ENVIRONMENT_FAILED):
                if made is None:
                    made = self._make()
                    environment = self._concurrent(made)
                    await environment.setup()
                else:
                    environment = self._concurrent(made)
            yield environment
            usable = made.reusable and not environment.broken
        finally:
            if usable and self._kept and made is not None:
                self._idle.append(made)
            elif made is not None:
                await self._close(made)

    async def _close(self, made: Made) -> None:
        if not (environment := self._concurrent(made)).holds_nothing:
            await close_or_log(environment, CLOSE_SECONDS, log, type(made).__name__)

    def _concurrent(self, made: Made) -> ConcurrentEnvironment:
        return (
            SerialEnvironment(made, system=self._system, clock=self._clock) if isinstance(made, Environment) else made
        )
