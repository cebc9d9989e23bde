"""Environment `subagents`: an agent splits a sum of two products, and two subagents compute them concurrently."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal

from palestra.envs import arithmetic
from palestra.envs.arithmetic import last_number, right_number
from palestra.envs.tasks import Split, draw_tasks
from palestra.tools import Calculator
from palestra.types.clock import Clock
from palestra_worlds.subagents import Subagent, SubagentEnvironment

SYSTEM = """Give each product to a subagent, both in one reply, then say the sum of their results. For 1 * 2 + 3 * 4:
<tool_call>
{"name": "delegate", "arguments": {"prompt": "1 * 2"}}
</tool_call>
<tool_call>
{"name": "delegate", "arguments": {"prompt": "3 * 4"}}
</tool_call>"""
_PRODUCT = re.compile(r"([0-9]{1,9})\s*[*×x]\s*([0-9]{1,9})")


class SplitSum(SubagentEnvironment):
    """A sum of two products, each of which the agent delegates to a subagent.

    The agent's reward is 1 if the last number of its answer is exactly the sum, else 0.
    """

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
        """Create the environment.

        Args:
            results: when the agent reads its subagents' results; see `SubagentEnvironment`.
            solver_calculator: whether subagents have a calculator.
            solver_reward: reward of each subagent whose last number is the first product of its prompt. It adds to the
                episode's reward; with `credit = "branch"` it stays with the subagent.
            max_steps: limit of replies of the agent, and of each subagent.
            max_agents: limit of subagents started in one episode.
            clock: source of observation times; None: the system's clock.
        """
        solver = Subagent(
            name="solver",
            system=arithmetic.CALCULATOR_SYSTEM if solver_calculator else arithmetic.SYSTEM,
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
    """Return 1.0 if the last number of `answer` is the first product in `prompt`, else 0.0, even without a product."""
    match = _PRODUCT.search(prompt)
    return float(match is not None and last_number(answer) == Decimal(int(match[1]) * int(match[2])))


def split_sum_tasks(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw sums of two products of numbers from 2 to 20; keys `id`, `prompt` and `answer`.

    There are 18,145 tasks, a quarter of them for validation; sums that differ only in the order of numbers are the same
    task.
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> dict[str, Any]:
    a, b, c, d = (source.randint(2, 20) for _ in range(4))
    products = sorted((min(x, y), max(x, y)) for x, y in ((a, b), (c, d)))
    name = "+".join(f"{x}*{y}" for x, y in products)
    return {"id": name, "prompt": f"What is {a} * {b} + {c} * {d}?", "answer": str(a * b + c * d)}
