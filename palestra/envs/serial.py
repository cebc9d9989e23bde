"""Adapter that runs the easy form of environment (`Environment`) as a concurrent one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from palestra.envs.concurrent import ConcurrentEnvironment
from palestra.envs.environment import Environment
from palestra.errors import EnvironmentMistake, NotScored
from palestra.schemas.clock import Clock
from palestra.schemas.messages import ChatMessage, text_message
from palestra.schemas.observations import Observation
from palestra.threads import call


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
        """Wrap `environment`.

        Args:
            environment: the environment to run; its methods run in threads if it is `blocking`.
            agent: name of the one agent.
            system: system message of the agent's conversation; None: the environment's own, if any.
            clock: source of the times of observations; None: the system's clock.
        """
        super().__init__(clock)
        self._environment, self._agent, self._system = environment, agent, system

    async def setup(self) -> None:
        """Run the environment's `setup`, in a thread if the environment is `blocking`."""
        await self._run(self._environment.setup)

    async def close(self) -> None:
        """Abandon the episode and run the environment's `close`."""
        await self.abandon()
        await self._run(self._environment.close)

    async def start(self, task: Mapping[str, Any]) -> None:
        """Reset the environment for this task and show its first observation."""
        text, info = checked_reset(await self._run(partial(self._environment.reset, task)))
        self.max_steps = self._environment.max_steps
        said = self._environment.system if self._system is None else self._system
        system = () if said is None else (text_message("system", said),)
        self.emit(self._agent, (*system, text_message("user", text)), tools=self._environment.tools, info=info)

    async def on_action(self, observation: Observation, action: ChatMessage) -> None:
        """Run one step of the environment and show the result."""
        found = await self._run(step_of(self._environment, action))
        seen, reward, terminated, truncated, info = checked_step(found)
        content = seen if isinstance(seen, tuple) else (text_message("user", seen),)
        self.emit(
            self._agent,
            content,
            parents=(observation.id,),
            tools=self._environment.tools,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await call(work, "palestra-environment", blocking=self._environment.blocking)


def step_of(environment: Environment, action: ChatMessage) -> Callable[[], Any]:
    """Return the call that steps an environment: of `step` if `step_message` is only the default, which calls it.

    So an environment whose `step` is asynchronous needs no thread.
    """
    if type(environment).step_message is Environment.step_message:
        return partial(environment.step, action.text)
    return partial(environment.step_message, action)


def checked_reset(found: Any) -> tuple[str, dict[str, Any]]:
    """Check the value that `reset` returned, and return it.

    Raises:
        EnvironmentMistake: the value is not a tuple of text and a dict.
    """
    if not (isinstance(found, tuple) and len(found) == 2):
        raise EnvironmentMistake(f"reset returns (observation, info), not {_shown(found)}")
    if not isinstance(found[0], str) or not isinstance(found[1], dict):
        raise EnvironmentMistake(f"reset returns (text, dict), not {_shown(found)}")
    return found


def checked_step(found: Any) -> tuple[str | tuple[ChatMessage, ...], float, bool, bool, dict[str, Any]]:
    """Check the value that `step` returned, and return it with plain Python types.

    Raises:
        NotScored: the reward is None, so the episode is left out of training.
        EnvironmentMistake: the value is not (observation, reward, terminated, truncated, info) with the right types.
    """
    if not (isinstance(found, tuple) and len(found) == 5):
        raise EnvironmentMistake(
            f"step returns (observation, reward, terminated, truncated, info), not {_shown(found)}"
        )
    seen, reward, terminated, truncated, info = found
    messages = isinstance(seen, tuple) and all(isinstance(message, ChatMessage) for message in seen)
    if not isinstance(seen, str) and not messages:
        raise EnvironmentMistake(f"an observation is text, or a tuple of messages, not {_shown(seen)}")
    if reward is None:
        raise NotScored("step returned None for its reward")
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError):
        raise EnvironmentMistake(f"a reward is a number, not {_shown(reward)}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise EnvironmentMistake(f"a reward is a finite number, not {number}")
    if type(terminated).__name__ not in ("bool", "bool_") or type(truncated).__name__ not in ("bool", "bool_"):
        raise EnvironmentMistake(f"terminated and truncated are True or False, not {_shown((terminated, truncated))}")
    if not isinstance(info, dict):
        raise EnvironmentMistake(f"info is a dict, not {_shown(info)}")
    return seen, number, bool(terminated), bool(truncated), info


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
