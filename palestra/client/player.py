"""Plays a worker's episodes: a user's function, or any other `EpisodePlayer`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from palestra.client.episode import Episode, ModelEndpoint, RolloutResult
from palestra.threads import is_async

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

        Args:
            episode: its lease is renewed meanwhile.
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
