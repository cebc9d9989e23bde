"""Products that a small model can't do in its head, and a calculator: one call, one answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from palestra.envs.arithmetic import right_number
from palestra.envs.splits import Split, draw_tasks
from palestra.envs.tool_environment import ToolEnvironment
from palestra.schemas.clock import Clock
from palestra.tools import Calculator

SYSTEM = """Use the calculator, then say the result. To use it, reply with:
<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 34"}}
</tool_call>"""


class CalculatorEnvironment(ToolEnvironment):
    """Reward 1 if the last number of the answer is exactly right, else 0."""

    reusable = True

    def __init__(
        self,
        *,
        system: str = SYSTEM,
        used_tool_reward: float = 0.0,
        max_steps: int = 4,
        clock: Clock | None = None,
    ) -> None:
        """Args:
        system: the system message; another one for models that call tools in another way.
        used_tool_reward: added once if any call of the calculator had a result, right answer or not. A little of it
            helps a model that has never called a tool; too much, and calling becomes the aim.
        max_steps: replies of the agent.
        clock: tells when something was observed.
        """
        super().__init__([Calculator()], right_number, system=system, max_steps=max_steps, clock=clock)
        self._used_tool_reward = used_tool_reward

    def score(self, task: Mapping[str, Any], answer: str) -> float:
        """See `ToolEnvironment`."""
        used = any(result.name == "calculator" and result.failure is None for result in self.results)
        return right_number(task, answer) + (self._used_tool_reward if used else 0.0)


def calculator_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Products of numbers from 101 to 9,999: `id`, `prompt`, `answer`. There are about 49 million, unordered.

    Raises:
        ConfigError: there are not so many.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    a, b = source.randint(101, 9999), source.randint(101, 9999)
    return {"id": f"{min(a, b)}*{max(a, b)}", "prompt": f"What is {a} * {b}?", "answer": str(a * b)}
