"""`TaskEnvironment`: one question, one answer, one reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from palestra.envs.environment import Environment, Step
from palestra.envs.rewards import reward_function


def task_prompt(task: Mapping[str, Any]) -> str:
    """Return the text under the task's key `prompt`, which is the default question of a task."""
    return str(task["prompt"])


class TaskEnvironment(Environment):
    """An environment that asks one question and ends after the first answer, which `reward_fn` scores."""

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        prompt: Callable[[Mapping[str, Any]], str] = task_prompt,
    ) -> None:
        """Create the environment.

        Args:
            reward_fn: `(task, answer) -> float`, or a function in TRL's form; sync or async.
            prompt: makes the question of a task.
        """
        self._reward, self._prompt = reward_function(reward_fn), prompt
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the task's question as the first observation."""
        self._task = task
        return self._prompt(task), {}

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Score the answer with the reward function and end the episode."""
        reward = self._reward(self._task, action)
        return _last(reward) if isinstance(reward, float) else _last_of(reward)


async def _last_of(reward: Awaitable[float]) -> Step:
    return _last(await reward)


def _last(reward: float) -> Step:
    return "", reward, True, False, {}
