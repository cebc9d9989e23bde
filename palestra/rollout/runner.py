"""Plays episodes in this process, through the same store and the same sessions as a worker outside does over HTTP."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from palestra.agents import Agent, ModelAgent
from palestra.client.arguments import checked_amount, checked_count
from palestra.errors import NotScored, RolloutFailed
from palestra.rollout.collect import Collected, Lost, Termination, TrajectoryCollectEngine
from palestra.rollout.environments import Environments, Made
from palestra.schemas.records import Episode, Task, Trajectory
from palestra.session import Sessions

log = logging.getLogger("palestra.rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """What is played: agents, in environments of which each episode gets a new one."""

    environment: Callable[[], Made]
    agents: Mapping[str, Agent] | None = None  # by name; None: a `ModelAgent` plays all
    system: str | None = None  # the agent's system message, in an `Environment`
    max_tokens: int | None = None  # of each reply, where `agents` is None
    temperature: float | None = None  # where the job does not fix it: neither in training nor in validation

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one makes no sense; the message names it.
        """
        if self.max_tokens is not None:
            checked_count("max_tokens", self.max_tokens)
        if self.temperature is not None:
            checked_amount("temperature", self.temperature)


class Runner:
    """Plays episodes of a job, any number side by side. As a context manager it uses environments again."""

    def __init__(
        self,
        sessions: Sessions,
        play: RolloutSpec,
        *,
        timeout_seconds: float | None = None,
        worker_id: str = "palestra-runner",
    ) -> None:
        """`timeout_seconds` is for one attempt; None: only the job's `max_episode_seconds` ends it."""
        self._sessions, self._store = sessions, sessions.context.store
        self._agents = play.agents or {"": ModelAgent(max_tokens=play.max_tokens)}
        self._environments = Environments(play.environment, system=play.system, clock=sessions.context.clock)
        self._temperature = play.temperature
        self._timeout_seconds, self.worker_id = timeout_seconds, worker_id

    async def __aenter__(self) -> Self:
        self._environments.keep()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._environments.close()

    async def play_episode(self, reset_kwargs: Mapping[str, Any] | None = None) -> Trajectory | None:
        """Play an episode to its end: the next one that is registered (None when there is none now), or a new one.

        Args:
            reset_kwargs: the task of a new episode, which is recorded and never trained on.

        Raises:
            RolloutFailed: see `play_claim`.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
        """
        store, name = self._store, None
        if reset_kwargs is not None:
            request = uuid.uuid4().hex
            name = await store.episodes.register_adhoc(
                Task(task_id=f"t{request[:15]}", data=dict(reset_kwargs)), request
            )
        episode = await self._claim(name)
        if episode is None:
            return None
        await self.play_claim(episode)
        return (await store.calls.trajectories([episode.episode_id]))[0]

    async def _claim(self, name: str | None) -> Episode | None:
        """Where it is cancelled, what was claimed meanwhile is given back."""
        claiming = asyncio.ensure_future(self._store.episodes.claim(self.worker_id, uuid.uuid4().hex, None, name))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if (episode := await claiming) is not None:
                await self.give_back(episode, Termination.CANCELLED, "the job was stopped")
            raise

    async def play_claim(self, episode: Episode) -> Collected:
        """Play a claimed episode to its end, and hand in its reward.

        Where something fails, or the time is over, the episode is given back: that is never a reward of 0. So it is
        when this is cancelled.

        Raises:
            RolloutFailed: the environment, an agent or the engine failed, or the time was over.
            EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
        """
        try:
            with self._store.leases.hold(
                episode.episode_id, episode.fence
            ):  # no call comes while the environment works
                async with asyncio.timeout(self._timeout_seconds) as limit:
                    collected = await self._collect(episode)
        except asyncio.CancelledError:
            await asyncio.shield(self.give_back(episode, Termination.CANCELLED, "the job was stopped"))
            raise
        except TimeoutError:
            assert limit.expired(), "everything else comes as RolloutFailed"
            late = RolloutFailed(Termination.TIMED_OUT, f"not over after {self._timeout_seconds:g} s")
            await self.give_back(episode, Termination.TIMED_OUT, str(late))
            raise late from None
        except RolloutFailed as error:
            await self.give_back(episode, Termination(error.termination), str(error))
            raise
        except NotScored as error:
            await self.give_back(episode, Termination.NOT_SCORED, str(error), discard=True)
            return Collected(termination=Termination.NOT_SCORED)
        await self._store.episodes.end(
            episode.episode_id,
            episode.fence,
            dict(collected.rewards) or {"agent": 0.0},
            collected.step_rewards,
            collected.metadata,
            collected.step_times,
        )
        return collected

    async def give_back(self, episode: Episode, termination: Termination, reason: str, discard: bool = False) -> None:
        """Let it be played again, or discard it; where it was cancelled, as if it had never been claimed."""
        try:
            await self._store.episodes.abort(
                episode.episode_id,
                episode.fence,
                f"{termination.value}: {reason}",
                discard=discard,
                counts=termination is not Termination.CANCELLED,
            )
        except Lost:  # its lease ran out meanwhile, so it was given back already
            log.info("episode %s was given back before: %s", episode.episode_id, reason)

    async def _collect(self, episode: Episode) -> Collected:
        async with self._environments.one() as environment:
            engine = TrajectoryCollectEngine(
                environment=environment,
                agents=self._agents,
                sessions=self._sessions,
                session=await self._sessions.begin(episode),
                policy=self._sessions.context.policy_name,
                temperature=self._temperature,
            )
            return await engine.collect(episode.task.data)
