"""The form of environments that rollouts run: observations and actions are independent of one another.

`SerialEnvironment` adapts the simple case of one agent and one observation at a time.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, ClassVar

from palestra.envs.environment import Environment
from palestra.envs.rewards import checked_names, finite_reward
from palestra.errors import Conflict, EpisodeOver, InvalidEnvironment, NotScored, PalestraError, place_of
from palestra.pictures.parts import parts_of
from palestra.threads import call
from palestra.types.calls import Chat
from palestra.types.clock import Clock, SystemClock
from palestra.types.messages import ChatMessage, Observation, StepReward, text_message
from palestra.waiting import ordinary_errors


class ConcurrentEnvironment(ABC):
    """A world in which several things may happen at the same time.

    A rollout calls `reset`, `observe` and `act`. A subclass implements `start` and `on_action`, and calls `emit` for
    each observation. The episode is over when no observation waits for an action and no action is being processed.
    """

    reusable: ClassVar[bool] = False  # True: `reset` may be called again; False: each episode gets a new environment
    roles: tuple[str, ...] = ()  # names of the agents, where they are the same in every episode
    gives_choices: bool = False  # whether observations may have `choices`, to which the replies of a model are held
    moves: tuple[str, ...] = ()  # all texts that may be choices, as far as they are known before an episode
    # The number of actions, of all agents together, after which every new observation is the last; None: no limit.
    max_steps: int | None = None
    # What an agent earns at most in an episode that its action has broken. It is to be the least that can be earned.
    forfeit_reward: float = 0.0
    broken: bool = False  # whether an action has broken it, so that no other episode may be played in it

    def __init__(self, clock: Clock | None = None) -> None:
        """Create an environment without an episode.

        Args:
            clock: source of `Observation.observed_at`; None: the system's clock.
        """
        self.clock = clock or SystemClock()
        self._begun = False
        self.calls: list[Chat] = []  # model calls of the episode so far, of all agents, in order
        self._clear()

    # Methods that a subclass implements.

    async def setup(self) -> None:  # noqa: B027 - optional to override
        """Prepare for the first episode: open connections, start processes. By default empty."""

    async def close(self) -> None:  # noqa: B027
        """Release what `setup` acquired. Called after the last episode, even if that failed."""

    @abstractmethod
    async def start(self, task: Mapping[str, Any]) -> None:
        """Begin the episode of `task`: emit the first observation of at least one agent."""

    @abstractmethod
    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Process an agent's action, concurrently with other actions.

        Args:
            observation: the observation that the agent answers.
            action: the agent's message, with its tool calls.
        """

    # Members that a subclass uses.

    @property
    def holds_nothing(self) -> bool:
        """Return whether there is nothing to close after an episode, because `close` is the default."""
        return is_default(self.close, ConcurrentEnvironment.close)

    @property
    def has_other_players(self) -> bool:
        """Return whether others play too, so that an agent's failure fails the attempt and is not the agent's loss."""
        return len(self.roles) > 1

    @property
    def cut_off(self) -> bool:
        """Return whether the episode has reached its `max_steps` actions."""
        return self.max_steps is not None and len(self._acted) >= self.max_steps

    def emit(
        self,
        agent: str,
        content: tuple[ChatMessage, ...],
        *,
        parents: tuple[str, ...] = (),
        tools: tuple[dict[str, Any], ...] = (),
        choices: tuple[str, ...] = (),
        reward: StepReward | None = None,
        terminated: bool = False,
        truncated: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> Observation:
        """Show an agent an observation.

        After `max_steps` actions the observation is truncated, unless it is terminated.

        Args:
            agent: name of the agent; a subagent's name begins with its parent's: `planner/search`.
            content: messages to append to the agent's conversation.
            parents: ids of the observations whose actions caused this one; empty at the episode's start.
            tools: tools that the agent may call in its answer, in OpenAI's shape.
            choices: the only valid answers; a `ModelAgent` samples one of them. (): any answer.
            reward: reward for the actions that caused it, or several by name; None: not scored, which differs from 0.
            terminated: the agent's part is over, so it must not act.
            truncated: the agent's part was cut off, for example by a limit.
            info: information for people; recorded with the episode, invisible to the agent.

        Returns:
            The observation, with its id.

        Raises:
            InvalidEnvironment: a reward is not a finite number, or one of several has an invalid name.
        """
        observation = Observation(
            id=f"o{next(self._numbers)}",
            parents=parents,
            agent=agent,
            content=content,
            tools=tools,
            choices=choices,
            reward=None if reward is None else _checked_reward(f"the reward of {agent!r}", reward, "is"),
            terminated=terminated,
            truncated=truncated or (self.cut_off and not terminated),
            observed_at=self.clock.now(),
            info=info or {},
        )
        if not observation.is_last:
            self._open[observation.id] = observation
        self._unseen.append(observation)
        self._changed.set()
        return observation

    def withdraw(self, observation_id: str, action: ChatMessage | None = None) -> None:
        """Stop waiting for an agent's action, because its time is over or its part has ended.

        Args:
            observation_id: id of an observation that waits for an action.
            action: the default action taken instead; None: no action.
        """
        self._open.pop(observation_id, None)
        self._withdrawn[observation_id] = action

    # Methods that a rollout calls.

    def is_withdrawn(self, observation_id: str) -> bool:
        """Return whether the environment no longer waits for the agent's action, and would refuse it."""
        return observation_id in self._withdrawn

    def action_in_place(self, observation_id: str) -> ChatMessage | None:
        """Return the default action taken when the observation was withdrawn, if any."""
        return self._withdrawn.get(observation_id)

    def survives_failure(self, observation_id: str) -> bool:
        """Return whether the episode continues if the agent of this observation fails.

        By default it does not: the failure of one agent fails the episode.
        """
        return False

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Begin an episode of `task`; remaining work of the previous episode is cancelled.

        Raises:
            Conflict: the environment is not reusable and has had an episode.
        """
        if self._begun and not self.reusable:
            raise Conflict(f"{type(self).__name__} is not reusable; make a new one for each episode")
        await self.abandon()
        self._clear()
        self.calls = []
        self._begun = True
        await self.start(task)

    async def observe(self) -> Observation:
        """Wait for the next observation and return it.

        Raises:
            EpisodeOver: the episode is over.
            Exception: the first exception raised by `on_action`.
        """
        while not self._unseen:
            if self._failure is not None:
                raise self._failure
            if not self._open and not self._working:
                raise EpisodeOver("nothing is open in this episode")
            self._changed.clear()
            await self._changed.wait()
        return self._unseen.popleft()

    def waits_only_for(self, observation_id: str) -> bool:
        """Return whether the environment is blocked until this observation is answered."""
        if len(self._open) != 1 or observation_id not in self._open or self._unseen:
            return False
        # A finished task stays in the dict until its callback has run, later in this turn of the loop.
        return all(task.done() for task in self._working.values())

    def act(self, observation_id: str, action: ChatMessage) -> None:
        """Answer an observation and return without waiting for the consequences.

        Repeating an equal action has no effect.

        Args:
            observation_id: id of the observation to answer.
            action: the agent's message.

        Raises:
            Conflict: another action was given before, or the observation expects none.
        """
        if observation_id in self._acted:
            if self._acted[observation_id] == action:
                return
            raise Conflict(f"another action was given for observation {observation_id} before; the first one stands")
        observation = self._open.pop(observation_id, None)
        if observation is None:
            raise Conflict(f"observation {observation_id} does not wait for an action")
        self._acted[observation_id] = action
        self._work(observation_id, partial(self.on_action, observation, action))

    def cancel(self, observation_id: str) -> None:
        """Give up on an observation: no action will come, and processing of one that came is cancelled."""
        self._open.pop(observation_id, None)
        if (task := self._working.get(observation_id)) is not None:
            task.cancel()
        self._changed.set()

    async def abandon(self) -> None:
        """End the episode at any point and wait until its work has stopped."""
        self._open.clear()
        tasks = list(self._working.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # not `gather`, whose caller can't be cancelled before the tasks have ended
        self._changed.set()

    def _clear(self) -> None:
        self._numbers = count()
        self._begun = False
        self._open: dict[str, Observation] = {}  # observations that wait for an action
        self._acted: dict[str, ChatMessage] = {}
        self._withdrawn: dict[str, ChatMessage | None] = {}  # observations that wait no more -> action in their place
        self._working: dict[str, asyncio.Task[None]] = {}
        self._unseen: deque[Observation] = deque()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def _work(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.ensure_future(_ordinary(work))
        self._working[name] = task
        task.add_done_callback(lambda done: self._worked(name, done))

    def _worked(self, name: str, done: asyncio.Task[None]) -> None:
        self._working.pop(name, None)
        if not done.cancelled() and isinstance(error := done.exception(), Exception):
            self._failure = self._failure or error
        self._changed.set()


class SerialEnvironment(ConcurrentEnvironment):
    """Runs an `Environment` as a `ConcurrentEnvironment` with one agent and one open observation at a time."""

    def __init__(
        self,
        environment: Environment,
        *,
        agent: str = "agent",
        system: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Wrap `environment`. `system`: system message of the agent's conversation; None: the environment's own, if
        any.
        """
        super().__init__(clock)
        self._environment, self._agent, self._system = environment, agent, system
        self.gives_choices, self.moves = environment.gives_choices, environment.choices

    @property
    def holds_nothing(self) -> bool:
        """Return whether the environment's `close` is the default."""
        return is_default(self._environment.close, Environment.close)

    async def setup(self) -> None:
        """Run the environment's `setup`, in a thread if the environment is `blocking`."""
        if not is_default(self._environment.setup, Environment.setup):
            await self._run(self._environment.setup)

    async def close(self) -> None:
        """Abandon the episode and run the environment's `close`."""
        await self.abandon()
        await self._run(self._environment.close)

    async def start(self, task: Mapping[str, Any]) -> None:
        """Reset the environment for this task and show its first observation."""
        self._environment.calls = self.calls
        seen, info = checked_reset(await self._run(partial(self._environment.reset, task)))
        self.max_steps, self.forfeit_reward = self._environment.max_steps, self._environment.forfeit_reward
        said = self._environment.system if self._system is None else self._system
        own = said is None or (seen and seen[0].role == "system")  # of a conversation that is the task's question
        system = () if own else (text_message("system", str(said)),)
        self.emit(
            self._agent,
            (*system, *seen),
            tools=self._environment.tools,
            choices=self._environment.choices,
            info=info,
        )

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run one step of the environment and show the result."""
        found = await self._run(step_call(self._environment, action))
        seen, reward, terminated, truncated, info = checked_step(found)
        self.emit(
            self._agent,
            seen,
            parents=(observation.id,),
            tools=self._environment.tools,
            choices=() if terminated or truncated else self._environment.choices,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await call(work, "palestra-environment", blocking=self._environment.blocking)


def is_default(method: Any, default: Any) -> bool:
    """Return whether a bound method is the one that a base class has, so that calling it has no effect."""
    return getattr(method, "__func__", None) is default


def step_call(environment: Environment, action: ChatMessage) -> Callable[[], Any]:
    """Return the call that steps an environment: `step` if `step_message` is only the default that calls it.

    So an environment with an asynchronous `step` needs no thread.
    """
    if type(environment).step_message is Environment.step_message:
        return partial(environment.step, action.text)
    return partial(environment.step_message, action)


def checked_reset(found: Any) -> tuple[tuple[ChatMessage, ...], dict[str, Any]]:
    """Check the result of `reset`, and return it with the observation as messages."""
    if not (isinstance(found, tuple) and len(found) == 2):
        raise InvalidEnvironment(f"reset returns (observation, info), not {_shown(found)}")
    if not isinstance(found[1], dict):
        raise InvalidEnvironment(f"reset returns (observation, dict), not {_shown(found)}")
    return _messages(found[0], "reset"), found[1]


def _messages(seen: Any, method: str) -> tuple[ChatMessage, ...]:
    """Return an observation as messages: its own, or one user message with its text and pictures."""
    if isinstance(seen, str):
        return (text_message("user", seen),)
    if isinstance(seen, tuple) and all(isinstance(message, ChatMessage) for message in seen):
        return seen
    try:
        return (ChatMessage(role="user", content=parts_of(seen)),)
    except TypeError as error:
        raise InvalidEnvironment(
            f"{method} returns an observation that is {_shown(seen)} ({error}); an observation is text, a picture, a "
            "list of texts and pictures, or a tuple of messages"
        ) from None


def checked_step(found: Any) -> tuple[tuple[ChatMessage, ...], StepReward, bool, bool, dict[str, Any]]:
    """Check the result of `step`, and return it with messages and plain Python types. Raises NotScored if the reward is
    None, so the episode is left out of training.
    """
    if not (isinstance(found, tuple) and len(found) == 5):
        raise InvalidEnvironment(
            f"step returns (observation, reward, terminated, truncated, info), not {_shown(found)}"
        )
    seen, reward, terminated, truncated, info = found
    messages = _messages(seen, "step")
    if reward is None:
        raise NotScored("step returned None for its reward")
    number = _checked_reward("step", reward)
    if type(terminated).__name__ not in ("bool", "bool_") or type(truncated).__name__ not in ("bool", "bool_"):
        raise InvalidEnvironment(f"terminated and truncated are True or False, not {_shown((terminated, truncated))}")
    if not isinstance(info, dict):
        raise InvalidEnvironment(f"info is a dict, not {_shown(info)}")
    return messages, number, bool(terminated), bool(truncated), info


def _checked_reward(owner: str, reward: Any, verb: str = "returned") -> StepReward:
    return checked_names(reward) if isinstance(reward, Mapping) else finite_reward(owner, reward, verb)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


WAIT_SECONDS = 3.0  # for an environment to close; the caller then goes on, and the environment goes on closing
_closing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive


async def close_or_log(
    environment: ConcurrentEnvironment, seconds: float, log: logging.Logger, name: str | None = None
) -> None:
    """Close an environment, and log its errors or a timeout.

    The caller waits for WAIT_SECONDS at most, so that no environment delays the end of a server. If the caller is
    cancelled, the environment still closes. `name` is for the log; None: the environment's class.
    """
    closing = asyncio.create_task(_close(environment, seconds, log, name or type(environment).__name__))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.wait((closing,), timeout=WAIT_SECONDS)


async def _ordinary(work: Callable[[], Awaitable[None]]) -> None:
    with ordinary_errors():
        await work()


async def _close(environment: ConcurrentEnvironment, seconds: float, log: logging.Logger, name: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await _ordinary(environment.close)
    except Exception as error:  # noqa: BLE001 - the user's code failed, after its episode was over
        said = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}{place_of(error)}"
        log.warning("closing a %s failed: %s", name, said)
