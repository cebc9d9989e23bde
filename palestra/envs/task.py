"""One question, one answer, one reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from palestra.envs.environment import Environment
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
        """`reward_fn` is `(task, answer) -> float`, or in TRL's form; `prompt` makes the question of a task."""
        self._reward, self._prompt = reward_function(reward_fn), prompt
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Ask."""
        self._task = task
        return self._prompt(task), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        return "", self._reward(self._task, action), True, False, {}
