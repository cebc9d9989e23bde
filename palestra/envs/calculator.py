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
    """Asks for one large product, which the agent may compute with the tool `calculator`.

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
            system: the system message; models that write tool calls in another format need another one.
            used_tool_reward: added once per episode if any call of the calculator succeeded, whether or not the answer
                is right. A small value helps a model that never calls a tool; a large one makes calling the goal.
            max_steps: limit of the agent's replies in an episode.
            clock: source of observation times; None: the system's clock.
        """
        super().__init__([Calculator()], right_number, system=system, max_steps=max_steps, clock=clock)
        self._used_tool_reward = used_tool_reward

    def score(self, task: Mapping[str, Any], answer: str) -> float:
        """Return 1.0 for a right `answer` to `task`, else 0.0, plus the reward for using the calculator."""
        used = any(result.name == "calculator" and result.failure is None for result in self.results)
        return right_number(task, answer) + (self._used_tool_reward if used else 0.0)


def calculator_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw products of two numbers from 101 to 9,999: about 49 million, counting `a * b` and `b * a` as one.

    Tasks have the keys `id`, `prompt` and `answer`.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    a, b = source.randint(101, 9999), source.randint(101, 9999)
    return {"id": f"{min(a, b)}*{max(a, b)}", "prompt": f"What is {a} * {b}?", "answer": str(a * b)}
