"""`Worker`: claims the episodes of a job and plays many of them side by side."""

from __future__ import annotations

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from palestra.client.async_client import AsyncClient
from palestra.client.episode import Episode, ModelEndpoint, RolloutResult, renewed
from palestra.client.plain_values import checked_count
from palestra.client.protocol import is_scored
from palestra.errors import Conflict, EpisodeForfeited, InvalidRequest, JobOver, NotScored, RolloutFailed, place_of
from palestra.threads import is_async
from palestra.waiting import cancelled, ordinary_errors

Outcome = float | Mapping[str, float] | RolloutResult | None
Rollout = Callable[[dict[str, Any], ModelEndpoint], Outcome | Awaitable[Outcome]]


class EpisodePlayer(ABC):
    """Plays claimed episodes, any number at the same time; releases its resources at the end of its block."""

    name: str = "the player"  # for messages about what it returned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    @abstractmethod
    async def play(self, episode: Episode) -> Outcome:
        """Play an episode to its end and return its reward.

        An exception releases the episode, and is never a reward. A reward of None leaves the episode out of training.
        """


class FunctionPlayer(EpisodePlayer):
    """Plays episodes with a rollout function, in threads unless it is a coroutine function."""

    def __init__(self, rollout: Rollout, concurrency: int) -> None:
        """Wrap a function `(task, endpoint) -> reward`."""
        self.name = getattr(rollout, "__name__", type(rollout).__name__)
        self._rollout = rollout
        self._threads = None if is_async(rollout) else ThreadPoolExecutor(concurrency, "palestra-rollout")

    async def __aexit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def play(self, episode: Episode) -> Outcome:
        """Call the function with the episode's task and model."""
        if self._threads is None:
            return await self._rollout(episode.task, episode.policy)  # type: ignore[misc, no-any-return]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._rollout, episode.task, episode.policy)  # type: ignore[arg-type]


log = logging.getLogger("palestra.worker")
FAILURES_IN_A_ROW = 20


class Worker:
    """Claims up to `concurrency` episodes at a time and plays each with `rollout(task, policy)`.

    `rollout` is a function (run in threads) or a coroutine function; it returns a reward, rewards by agent, or a
    `RolloutResult`. Or it is an `EpisodePlayer`, such as the one for environments. An exception, or a value that is not
    a reward, releases the episode and is never a reward. After FAILURES_IN_A_ROW failures without a success in between,
    the last error is raised. A reward of None leaves the episode out of training, without a retry.
    """

    def __init__(self, client: AsyncClient, rollout: Rollout | EpisodePlayer, concurrency: int) -> None:
        """Create a worker; `run` starts it.

        Args:
            client: of the job.
            rollout: see above.
            concurrency: number of concurrent episodes, at least 1.

        Raises:
            ConfigError: `concurrency` is not an integer, or below 1.
        """
        self._client = client
        self._concurrency = concurrency = checked_count("concurrency", concurrency)
        self._player = rollout if isinstance(rollout, EpisodePlayer) else FunctionPlayer(rollout, concurrency)
        self._in_a_row = 0
        self._draining = False
        self._claiming: set[asyncio.Future[Episode | None]] = set()
        self.counts: Counter[str] = Counter()

    def drain(self) -> None:
        """Claim no further episodes; `run` returns when the open ones have ended."""
        self._draining = True
        for claiming in self._claiming:
            claiming.cancel()

    async def run(self) -> None:
        """Play episodes until the job is over, or `drain` is called.

        Raises:
            JobOver: another job that plays along has ended (`SeatEnvironment`).
            PalestraError: the server refuses the worker, or cannot be reached for long.
            Exception: the last error of the rollout function, after FAILURES_IN_A_ROW failures in a row.
        """
        try:
            async with self._player, asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._loop())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _loop(self) -> None:
        while not self._draining and (episode := await self._claim()) is not None:
            await self._play(episode)

    async def _claim(self) -> Episode | None:
        """Return the next episode, or None when the job is over or the worker drains."""
        claiming = asyncio.ensure_future(self._client.begin_episode())
        self._claiming.add(claiming)
        try:
            await asyncio.wait((claiming,))
            return None if claiming.cancelled() else claiming.result()
        finally:
            self._claiming.discard(claiming)
            await cancelled(claiming)  # which gives back what it has claimed, while the client is still open

    async def _play(self, episode: Episode) -> None:
        try:
            async with renewed(self._client.heartbeat, episode):
                try:
                    with ordinary_errors():
                        result = await self._player.play(episode)
                except EpisodeForfeited as error:
                    log.warning("episode %s: forfeit: %s", episode.episode_id, error)
                    result = RolloutResult(reward=error.reward, forfeit=True, metadata={"forfeit": str(error)[:2000]})
                result = result if isinstance(result, RolloutResult) else RolloutResult(reward=result)
                if not is_scored(result):
                    raise NotScored(f"{self._player.name} returned None")
                await self._client.end_episode(episode, result)
        except NotScored as error:
            self.counts["not_scored"] += 1
            await self._give_back(episode, error)
        except JobOver as error:
            if await self._give_back(episode, error):  # so it is another job that is over, which plays along
                raise
        except Conflict as error:  # the lease was lost; another worker plays the episode now
            self.counts["lost"] += 1
            log.warning("%s", error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.counts["failed"] += 1
            self._in_a_row += 1
            where = f"episode {episode.episode_id} (task {episode.task_id})"
            log.warning("%s failed: %s: %s%s", where, type(error).__name__, error, place_of(error))
            await self._give_back(episode, error)
            if self._in_a_row >= FAILURES_IN_A_ROW:
                if isinstance(error, InvalidRequest):
                    raise InvalidRequest(f"{where}: {error}", error.field) from error
                raise
        else:
            self.counts["played"] += 1
            self._in_a_row = 0

    async def _give_back(self, episode: Episode, error: Exception) -> bool:
        """Release an episode, and return whether it was this worker's."""
        if isinstance(error, RolloutFailed):
            reason = f"{error.termination}: {error}"
        elif isinstance(error, NotScored):
            reason = f"not_scored: {error}"
        else:
            reason = "".join(traceback.format_exception_only(error)).strip() + place_of(error)
        try:
            await self._client.abort_episode(episode, reason, discard=isinstance(error, NotScored))
        except Conflict:  # the lease was lost; the episode needs no giving back
            self.counts["lost"] += 1
            return False
        return True


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
