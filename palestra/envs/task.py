"""One question, one answer, one reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from palestra.envs.environment import Environment, Step
from palestra.envs.rewards import reward_function


def task_prompt(task: Mapping[str, Any]) -> str:
    """Return the text under the task's key `prompt`."""
    return str(task["prompt"])


class TaskEnvironment(Environment):
    """Ends after the first action; its reward is what `reward_fn` makes of it."""

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        prompt: Callable[[Mapping[str, Any]], str] = task_prompt,
    ) -> None:
        """Make an environment of one question.

        Args:
            reward_fn: `(task, answer) -> float`, or in TRL's form; sync or async.
            prompt: makes the question of a task.
        """
        self._reward, self._prompt = reward_function(reward_fn), prompt
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Ask."""
        self._task = task
        return self._prompt(task), {}

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Score the answer, and end."""
        reward = self._reward(self._task, action)
        return _last(reward) if isinstance(reward, float) else _last_of(reward)


async def _last_of(reward: Awaitable[float]) -> Step:
    return _last(await reward)


def _last(reward: float) -> Step:
    return "", reward, True, False, {}
