"""Sums and products that a small model can learn to do in its head."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from palestra.envs.splits import Split, draw_tasks
from palestra.envs.task import TaskEnvironment

SYSTEM = "You are a calculator. Reply with the number only."
_NUMBER = re.compile(r"(?<![0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


class Arithmetic(TaskEnvironment):
    """One sum or product, one answer. Reward 1 if its last number is right, else 0."""

    blocking = False
    reusable = True

    def __init__(self, *, system: str = SYSTEM) -> None:
        """`system` is the system message."""
        super().__init__(right_number)
        self.system = system


def last_number(text: str) -> Decimal | None:
    """The last number of a text, with or without commas between thousands; None: it has none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def right_number(task: Mapping[str, Any], answer: str) -> float:
    """1 if the last number of the answer is exactly the task's `answer`, else 0."""
    return float(last_number(answer) == Decimal(str(task["answer"])))


def arithmetic_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Sums of numbers from 1 to 99 and products of numbers from 2 to 20: `id`, `prompt`, `answer`.

    There are 5,140, unordered, a quarter of them for validation: `a + b` is
    never in one split while `b + a` is in the other.

    Raises:
        ConfigError: there are not so many.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    sign, least, most = source.choice((("+", 1, 99), ("*", 2, 20)))
    a, b = source.randint(least, most), source.randint(least, most)
    answer = a + b if sign == "+" else a * b
    return {"id": f"{min(a, b)}{sign}{max(a, b)}", "prompt": f"{a} {sign} {b} =", "answer": str(answer)}
