"""One episode: agents and a concurrent environment, until nothing is open in it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from palestra.agents import Agent
from palestra.envs import ConcurrentEnvironment
from palestra.errors import ContextOverflow, EpisodeOver
from palestra.schemas.messages import ChatMessage
from palestra.schemas.observations import Observation
from palestra.schemas.records import Chat
from palestra.session import EpisodeSession, ModelCall, Sessions


class Termination(StrEnum):
    """Why an episode has ended by itself. One that failed, or was cancelled, raises instead and has no reward."""

    DONE = "done"
    TRUNCATED = "truncated"  # by the environment: a limit of steps, for instance
    CONTEXT_FULL = "context_full"  # an agent's conversation left no room for a reply


@dataclass(kw_only=True, slots=True)
class Step:
    """One TimeStep: an observation that asked for an action, and what came of it."""

    observation: Observation
    reward: float = 0.0
    acted_at: float | None = None  # Unix seconds; None: no action was given
    chats: list[Chat] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Collected:
    """What an episode came to."""

    termination: Termination = Termination.DONE
    steps: list[Step] = field(default_factory=list)  # in the order of observation; TimeStep i is entry i
    rewards: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by agent

    @property
    def step_rewards(self) -> list[float]:
        """By TimeStep."""
        return [step.reward for step in self.steps]


class TrajectoryCollectEngine:
    """Plays episodes of one session: every observation gets its agent's answer, side by side."""

    def __init__(
        self,
        *,
        environment: ConcurrentEnvironment,
        agents: Mapping[str, Agent],
        sessions: Sessions,
        session: EpisodeSession,
        policy: str,
    ) -> None:
        """`agents` by name; an agent that is not there is played by its nearest parent's, or by that named ""."""
        self._environment, self._agents = environment, agents
        self._sessions, self._session, self._policy = sessions, session, policy
        self._histories: dict[str, tuple[ChatMessage, ...]] = defaultdict(tuple)
        self._number: dict[str, int] = {}  # observation -> its TimeStep
        self._result = Collected()

    async def collect(self, task: Mapping[str, Any]) -> Collected:
        """Play one episode to its end. Whatever happens, nothing of it runs on.

        Raises:
            Exception: what the environment or an agent raised; the episode then has no reward.
        """
        turns: dict[asyncio.Task[None], str] = {}
        observing: asyncio.Task[Observation] | None = None
        try:
            await self._environment.reset(task)
            while True:
                observing = observing or asyncio.ensure_future(self._environment.observe())
                await asyncio.wait((observing, *turns), return_when=asyncio.FIRST_COMPLETED)
                for turn in [turn for turn in turns if turn.done()]:
                    del turns[turn]
                    turn.result()
                if observing.done():
                    observation, observing = observing.result(), None
                    if self._take(observation):
                        turns[asyncio.ensure_future(self._turn(observation))] = observation.id
        except EpisodeOver:
            return self._result
        except ContextOverflow:
            self._result.termination = Termination.CONTEXT_FULL
            return self._result
        finally:
            left = [*turns, *([observing] if observing is not None else [])]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._environment.abandon()

    def _take(self, observation: Observation) -> bool:
        """Record an observation; returns whether it asks for an action."""
        result = self._result
        result.rewards[observation.agent] += observation.reward
        if known := [self._number[parent] for parent in observation.parents if parent in self._number]:
            result.steps[max(known)].reward += observation.reward
        if observation.truncated and not observation.terminated:
            result.termination = Termination.TRUNCATED
        if observation.is_last:
            return False
        self._number[observation.id] = len(result.steps)
        result.steps.append(Step(observation=observation))
        return True

    async def _turn(self, observation: Observation) -> None:
        """An agent's answer."""
        number, name = self._number[observation.id], observation.agent
        handle = _Handle(self, name, number)
        chats, action = await self._agent(name).step(observation, handle)
        step = self._result.steps[number]
        step.chats, step.acted_at = chats, self._environment.clock.now()
        self._histories[name] = (*self._histories[name], *observation.content, action)
        self._environment.act(observation.id, action)

    def _agent(self, name: str) -> Agent:
        while name not in self._agents and name:
            name = name.rpartition("/")[0]
        return self._agents[name]

    async def call(self, call: ModelCall) -> Chat:
        """One call of the model, if there is room for it."""
        with self._sessions.admitted():
            return await self._session.chat(call)


class _Handle:
    """See `PolicyHandle`."""

    def __init__(self, engine: TrajectoryCollectEngine, agent: str, step: int) -> None:
        self._engine, self._agent, self._step = engine, agent, step

    @property
    def name(self) -> str:
        return self._engine._policy

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        return self._engine._histories[self._agent]

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Chat:
        call = ModelCall(
            policy=self.name,
            messages=tuple(messages),
            tools=tuple(dict(tool) for tool in tools),
            max_tokens=max_tokens,
            agent=self._agent,
            time_step=self._step,
        )
        return await self._engine.call(call)
