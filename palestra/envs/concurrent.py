"""The form of environments that rollouts run: observations and actions come and go independently of one another.

One action may bring no observation, one, or many, in any order and at any time; several agents act at once. The easy
form, `Environment`, is an adapter over it (`SerialEnvironment`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from itertools import count
from typing import Any, ClassVar

from palestra.errors import Conflict, EpisodeOver
from palestra.schemas.clock import Clock, SystemClock
from palestra.schemas.messages import ChatMessage
from palestra.schemas.observations import Observation


class ConcurrentEnvironment(ABC):
    """A world in which several things may happen at once.

    `observe` and `act` are what a rollout uses. A subclass implements `start` and `on_action`, and calls `emit` for
    whatever there is to see. The episode is over when nothing is open: no observation waits for an action, and no
    action is being worked on.
    """

    reusable: ClassVar[bool] = False  # whether `reset` may be called again; otherwise each episode gets a new one
    max_steps: int | None = (
        None  # after so many actions, all agents' together, whatever is shown is the last; None: any
    )

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock` tells when something was observed."""
        self.clock = clock or SystemClock()
        self._begun = False
        self._clear()

    # What a subclass implements.

    async def setup(self) -> None:  # noqa: B027 - nothing to do, unless there is
        """Before the first episode: connections, processes."""

    async def close(self) -> None:  # noqa: B027
        """After the last episode, also after one that failed."""

    @abstractmethod
    async def start(self, task: Mapping[str, Any]) -> None:
        """Emit what there is to see at first."""

    @abstractmethod
    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """An agent answers an observation; runs beside the answers to other observations."""

    # What it calls.

    @property
    def cut_off(self) -> bool:
        """Whether the episode has had its `max_steps` actions."""
        return self.max_steps is not None and len(self._acted) >= self.max_steps

    def emit(
        self,
        agent: str,
        content: tuple[ChatMessage, ...],
        *,
        parents: tuple[str, ...] = (),
        tools: tuple[dict[str, Any], ...] = (),
        reward: float | None = None,
        terminated: bool = False,
        truncated: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> Observation:
        """Show something to an agent. After `max_steps` actions it is truncated, unless it is terminated.

        `info` is for people: it is recorded with the episode, and the agent does not see it.
        """
        observation = Observation(
            id=f"o{next(self._numbers)}",
            parents=parents,
            agent=agent,
            content=content,
            tools=tools,
            reward=reward,
            terminated=terminated,
            truncated=truncated or (self.cut_off and not terminated),
            observed_at=self.clock.now(),
            info=info or {},
        )
        if not observation.is_last:
            self._open[observation.id] = observation
        self._unseen.put_nowait(observation)
        self._changed.set()
        return observation

    # What a rollout calls.

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Begin an episode; what was left of the one before is cancelled.

        Raises:
            Conflict: the environment is not reusable, and had an episode.
        """
        if self._begun and not self.reusable:
            raise Conflict(f"{type(self).__name__} is not reusable; make a new one for each episode")
        await self.abandon()
        self._clear()
        self._begun = True
        await self.start(task)

    async def observe(self) -> Observation:
        """What comes next.

        Raises:
            EpisodeOver: nothing more will come.
            Exception: what `on_action` raised.
        """
        while self._unseen.empty():
            if self._failure is not None:
                raise self._failure
            if not self._open and not self._working:
                raise EpisodeOver("nothing is open in this episode")
            self._changed.clear()
            await self._changed.wait()
        return self._unseen.get_nowait()

    def waits_only_for(self, observation_id: str) -> bool:
        """Whether nothing happens until this observation is answered."""
        if len(self._open) != 1 or observation_id not in self._open or not self._unseen.empty():
            return False
        return all(task.done() for task in self._working.values())  # those that end with this turn of the loop, too

    def act(self, observation_id: str, action: ChatMessage) -> None:
        """Answer an observation; returns at once. The same again is a no-op.

        Raises:
            Conflict: another action was given before, or the observation asks for none.
        """
        if observation_id in self._acted:
            if self._acted[observation_id] == action:
                return
            raise Conflict(f"another action was given for observation {observation_id} before; the first one stands")
        observation = self._open.pop(observation_id, None)
        if observation is None:
            raise Conflict(f"observation {observation_id} does not wait for an action")
        self._acted[observation_id] = action
        self._work(observation_id, self.on_action(observation, action))

    def cancel(self, observation_id: str) -> None:
        """No action will come for this observation, and what its action began is stopped."""
        self._open.pop(observation_id, None)
        if (task := self._working.get(observation_id)) is not None:
            task.cancel()
        self._changed.set()

    async def abandon(self) -> None:
        """End the episode wherever it is: nothing of it runs on."""
        self._open.clear()
        tasks = list(self._working.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._changed.set()

    def _clear(self) -> None:
        self._numbers = count()
        self._begun = False
        self._open: dict[str, Observation] = {}  # that wait for an action
        self._acted: dict[str, ChatMessage] = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._unseen: asyncio.Queue[Observation] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def _work(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._working[name] = task
        task.add_done_callback(lambda done: self._worked(name, done))

    def _worked(self, name: str, done: asyncio.Task[None]) -> None:
        self._working.pop(name, None)
        if not done.cancelled() and isinstance(error := done.exception(), Exception):
            self._failure = self._failure or error
        self._changed.set()
