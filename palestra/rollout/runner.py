"""Plays episodes in this process, through the same store and the same sessions as a worker outside does over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.agents import Agent, ModelAgent
from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.errors import Conflict
from palestra.rollout.collect import Collected, TrajectoryCollectEngine
from palestra.schemas.records import Claim, Task, Trajectory
from palestra.session import Sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Agents, in environments from `make_environment`; a new environment for every episode."""

    sessions: Sessions
    make_environment: Callable[[], Environment | ConcurrentEnvironment]
    agents: Mapping[str, Agent] | None = None  # by name; None: a `ModelAgent` plays all
    system: str | None = None  # the agent's system message, in an `Environment`
    max_tokens: int | None = None  # of each reply, where `agents` is None
    worker_id: str = "runner"

    async def play_episode(self, reset_kwargs: Mapping[str, Any] | None = None) -> Trajectory | None:
        """Play an episode to its end: the next one that is registered (None when there is none now), or a new one.

        An environment or an engine that fails gives the episode back; that is never a reward of 0.

        Args:
            reset_kwargs: the task of a new episode, which is recorded and never trained on.

        Raises:
            Exception: what the environment or an agent raised.
            PalestraError: the lease was lost, or the engine failed.
        """
        store = self.sessions.context.store
        name = None
        if reset_kwargs is not None:
            request = uuid.uuid4().hex
            name = await store.register_adhoc(Task(task_id=f"t{request[:15]}", data=dict(reset_kwargs)), request)
        claim = await store.claim(self.worker_id, uuid.uuid4().hex, None, name)
        if claim is None:
            return None
        episode = claim.episode
        try:
            collected = await self._collect(claim)
        except Conflict:  # the lease was lost: it is somebody else's episode now
            raise
        except Exception as error:
            await store.abort(episode.episode_id, episode.fence, f"{type(error).__name__}: {error}", discard=False)
            raise
        await store.end(
            episode.episode_id,
            episode.fence,
            dict(collected.rewards) or {"agent": 0.0},
            collected.step_rewards,
            {"termination": collected.termination.value},
        )
        return (await store.trajectories([episode.episode_id]))[0]

    async def _collect(self, claim: Claim) -> Collected:
        made = self.make_environment()
        clock = self.sessions.context.clock
        environment = (
            SerialEnvironment(made, system=self.system, clock=clock) if isinstance(made, Environment) else made
        )
        session = await self.sessions.open(claim.episode.episode_id, claim.episode.fence)
        engine = TrajectoryCollectEngine(
            environment=environment,
            agents=self.agents or {"": ModelAgent(max_tokens=self.max_tokens)},
            sessions=self.sessions,
            session=session,
            policy=claim.policy,
        )
        try:
            await environment.setup()
            return await engine.collect(claim.episode.task.data)
        finally:
            await environment.close()
