"""Plays episodes in this process, through the same store and the same sessions as a worker outside does over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from palestra.envs import Environment
from palestra.errors import Conflict
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.records import Claim, Trajectory
from palestra.session import ModelCall, Sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """One agent with one history, in environments from `make_environment`."""

    sessions: Sessions
    make_environment: Callable[[], Environment]
    system: str | None = None  # the agent's system message
    max_tokens: int | None = None  # of each reply
    worker_id: str = "runner"

    async def play_episode(self) -> Trajectory | None:
        """Claim the next episode and play it to its end; None when there is none now.

        An environment or an engine that fails gives the episode back; that is never a reward of 0.

        Raises:
            Exception: what the environment raised.
            PalestraError: the lease was lost, or the engine failed.
        """
        store = self.sessions.context.store
        claim = await store.claim(self.worker_id, uuid.uuid4().hex, None)
        if claim is None:
            return None
        episode = claim.episode
        try:
            rewards = await self._interact(claim)
        except Conflict:  # the lease was lost: it is somebody else's episode now
            raise
        except Exception as error:
            await store.abort(episode.episode_id, episode.fence, f"{type(error).__name__}: {error}", discard=False)
            raise
        await store.end(episode.episode_id, episode.fence, {"agent": sum(rewards)}, rewards, {})
        return (await store.trajectories([episode.episode_id]))[0]

    async def _interact(self, claim: Claim) -> list[float]:
        """Observation, reply, observation, … until the environment ends; returns the rewards by TimeStep."""
        environment = self.make_environment()
        session = await self.sessions.open(claim.episode.episode_id, claim.episode.fence)
        messages: tuple[ChatMessage, ...] = () if self.system is None else (text_message("system", self.system),)
        observation, _ = environment.reset(claim.episode.task.data)
        rewards: list[float] = []
        over = False
        while not over:
            messages = (*messages, text_message("user", observation))
            call = ModelCall(policy=claim.policy, messages=messages, max_tokens=self.max_tokens, time_step=len(rewards))
            with self.sessions.admitted():
                chat = await session.chat(call)
            messages = (*messages, chat.reply)
            observation, reward, terminated, truncated, _ = environment.step(chat.reply.text)
            rewards.append(reward)
            over = terminated or truncated
        return rewards
