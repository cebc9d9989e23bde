"""Environments `arithmetic` and `calculator`: sums in the head, and products too large for it with a calculator."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from palestra.envs.environment import TaskEnvironment
from palestra.envs.tasks import Split, draw_tasks
from palestra.envs.tool_environment import ToolEnvironment
from palestra.tools import Calculator
from palestra.types.clock import Clock

SYSTEM = "You are a calculator. Reply with the number only."
_NUMBER = re.compile(r"(?<![0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


class Arithmetic(TaskEnvironment):
    """Asks for one sum or product and ends with the first answer.

    The reward is 1 if the last number of the answer is exactly right, else 0.
    """

    blocking = False
    reusable = True

    def __init__(self, *, system: str = SYSTEM) -> None:
        """Create the environment.

        Args:
            system: the system message of each conversation.
        """
        super().__init__(right_number)
        self.system = system


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, with or without commas between thousands, or None if the text has no number."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def is_number(text: str) -> bool:
    """Return whether a text is exactly one number, as `last_number` reads it."""
    return _NUMBER.fullmatch(text.strip()) is not None


def right_number(task: Mapping[str, Any], answer: str) -> float:
    """Return 1.0 if the last number of `answer` equals `task["answer"]` exactly, else 0.0."""
    return float(last_number(answer) == Decimal(str(task["answer"])))


def arithmetic_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw sums of numbers from 1 to 99 and products of numbers from 2 to 20.

    There are 5,140 tasks, a quarter of them for validation. `a + b` and `b + a` are one task, so they are in the same
    split. Tasks have the keys `id`, `prompt` and `answer`.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    sign, least, most = source.choice((("+", 1, 99), ("*", 2, 20)))
    a, b = source.randint(least, most), source.randint(least, most)
    answer = a + b if sign == "+" else a * b
    return {"id": f"{min(a, b)}{sign}{max(a, b)}", "prompt": f"{a} {sign} {b} =", "answer": str(answer)}


CALCULATOR_SYSTEM = """Use the calculator, then say the result. To use it, reply with:
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
        system: str = CALCULATOR_SYSTEM,
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
    return draw_tasks(split, count, seed, _draw_product)


def _draw_product(source: random.Random) -> dict[str, Any]:
    a, b = source.randint(101, 9999), source.randint(101, 9999)
    return {"id": f"{min(a, b)}*{max(a, b)}", "prompt": f"What is {a} * {b}?", "answer": str(a * b)}
