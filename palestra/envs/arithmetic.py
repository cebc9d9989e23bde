"""Environment `arithmetic`: sums and products that a small model can learn to compute in its head."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from palestra.envs.environment import TaskEnvironment
from palestra.envs.task_splits import Split, draw_tasks

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
    found = _NUMBER.findall(text)
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
