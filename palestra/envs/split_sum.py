"""The sum of two products: an agent splits it, and two subagents work on the products at the same time."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal

from palestra.envs import arithmetic, calculator
from palestra.envs.arithmetic import last_number, right_number
from palestra.envs.delegating import Subagent
from palestra.envs.splits import Split, draw_tasks
from palestra.envs.subagents import SubagentEnvironment
from palestra.schemas.clock import Clock
from palestra.tools import Calculator

SYSTEM = """Give each product to a subagent, both in one reply, then say the sum of their results. For 1 * 2 + 3 * 4:
<tool_call>
{"name": "delegate", "arguments": {"prompt": "1 * 2"}}
</tool_call>
<tool_call>
{"name": "delegate", "arguments": {"prompt": "3 * 4"}}
</tool_call>"""
_PRODUCT = re.compile(r"([0-9]{1,9})\s*[*×x]\s*([0-9]{1,9})")


class SplitSum(SubagentEnvironment):
    """Reward of the agent: 1 if the last number of its answer is exactly the sum, else 0."""

    reusable = True

    def __init__(
        self,
        *,
        results: Literal["together", "each"] = "together",
        solver_calculator: bool = False,
        solver_reward: float = 0.0,
        max_steps: int = 4,
        max_agents: int = 4,
        clock: Clock | None = None,
    ) -> None:
        """Args:
        results: see `SubagentEnvironment`.
        solver_calculator: whether subagents have a calculator, or do it in their heads.
        solver_reward: of each subagent whose last number is the first product of its prompt. It adds to the
            episode's reward; with `credit = "branch"` it stays with the subagent.
        max_steps: replies of the agent, and of each subagent.
        max_agents: subagents of one episode.
        clock: tells when something was observed.
        """
        solver = Subagent(
            name="solver",
            system=calculator.SYSTEM if solver_calculator else arithmetic.SYSTEM,
            tools=(Calculator(),) if solver_calculator else (),
            max_steps=max_steps,
        )

        def scored(task: Mapping[str, Any], prompt: str, answer: str) -> float:
            return solver_reward * right_product(prompt, answer)

        super().__init__(
            [solver],
            right_number,
            subagent_reward_fn=scored if solver_reward else None,
            system=SYSTEM,
            results=results,
            max_steps=max_steps,
            max_agents=max_agents,
            clock=clock,
        )


def right_product(prompt: str, answer: str) -> float:
    """1 if the last number of the answer is the first product of the prompt, else 0; also where there is none."""
    match = _PRODUCT.search(prompt)
    return float(match is not None and last_number(answer) == Decimal(int(match[1]) * int(match[2])))


def split_sum_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Sums of two products of numbers from 2 to 20: `id`, `prompt`, `answer`. There are 18,145, unordered,
    a quarter of them for validation.

    Raises:
        ConfigError: there are not so many.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    a, b, c, d = (source.randint(2, 20) for _ in range(4))
    products = sorted((min(x, y), max(x, y)) for x, y in ((a, b), (c, d)))
    name = "+".join(f"{x}*{y}" for x, y in products)
    return {"id": name, "prompt": f"What is {a} * {b} + {c} * {d}?", "answer": str(a * b + c * d)}
