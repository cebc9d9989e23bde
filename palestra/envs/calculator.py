"""Environment `calculator`: products too large for a small model's head, and a calculator to compute them with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from palestra.envs.arithmetic import right_number
from palestra.envs.task_splits import Split, draw_tasks
from palestra.envs.tool_environment import ToolEnvironment
from palestra.tools import Calculator
from palestra.types.clock import Clock

SYSTEM = """Use the calculator, then say the result. To use it, reply with:
<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 34"}}
</tool_call>"""


class CalculatorEnvironment(ToolEnvironment):
    """Ask for one large product, which the agent may compute with the tool `calculator`.

    The reward is 1 if the last number of the answer is exactly right, else 0, plus `used_tool_reward` if the tool was
    used.
    """

    reusable = True

    def __init__(
        self,
        *,
        system: str = SYSTEM,
        used_tool_reward: float = 0.0,
        max_steps: int = 4,
        clock: Clock | None = None,
    ) -> None:
        """Create the environment.

        Args:
            system: the system message. Models that write tool calls in another format need another one.
            used_tool_reward: added once per episode if any call of the calculator succeeded, whether or not the answer
                is right. A little of it helps a model that has never called a tool; too much, and calling becomes the
                aim.
            max_steps: replies that the agent may make in an episode.
            clock: source of the times of observations; None: the system's clock.
        """
        super().__init__([Calculator()], right_number, system=system, max_steps=max_steps, clock=clock)
        self._used_tool_reward = used_tool_reward

    def score(self, task: Mapping[str, Any], answer: str) -> float:
        """Return 1.0 for a right `answer` to `task`, else 0.0, plus the reward for having used the calculator."""
        used = any(result.name == "calculator" and result.failure is None for result in self.results)
        return right_number(task, answer) + (self._used_tool_reward if used else 0.0)


def calculator_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw products of two numbers from 101 to 9,999; there are about 49 million, counting `a * b` and `b * a` as one.

    Args:
        split: the split to draw from.
        count: number of tasks.
        seed: other seeds draw other tasks of the same split.

    Returns:
        `count` distinct tasks with the keys `id`, `prompt` and `answer`.

    Raises:
        ConfigError: the split has fewer than `count` tasks.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    a, b = source.randint(101, 9999), source.randint(101, 9999)
    return {"id": f"{min(a, b)}*{max(a, b)}", "prompt": f"What is {a} * {b}?", "answer": str(a * b)}
