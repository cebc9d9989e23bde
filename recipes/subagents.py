"""Subagents: SmolLM2-135M learns to split a task between two subagents, and to be one.

    python recipes/subagents.py [--steps 6] [--seed 0] [--model SmolLM2-135M-Instruct]

The agent is asked for (a + b) + (c + d). It gives each half to a subagent, both in one reply; they answer at the same
time, each in a conversation of its own; then it says the sum. All of them are the same model, and the whole tree of an
episode is trained. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import palestra
from palestra import (
    Agent,
    Chat,
    ChatMessage,
    JobConfig,
    Observation,
    PolicyHandle,
    RolloutSpec,
    Subagent,
    SubagentEnvironment,
    last_number,
    right_number,
)


def example(*halves: tuple[str, str], answer: str) -> list[ChatMessage]:
    """Return a worked example: a question, a call for each half, their results, and the sum."""
    calls = [{"id": p, "function": {"name": "delegate", "arguments": f'{{"prompt": "{p} ="}}'}} for p, _ in halves]
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": f"{' + '.join(f'({half})' for half, _ in halves)} ="},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": half, "content": result} for half, result in halves),
        {"role": "assistant", "content": answer},
    ]
    return [ChatMessage.model_validate(message) for message in conversation]


EXAMPLES = [
    *example(("3 + 4", "7"), ("5 + 9", "14"), answer="21"),
    *example(("8 + 2", "10"), ("6 + 7", "13"), answer="23"),
    *example(("2 + 6", "8"), ("9 + 3", "12"), answer="20"),
]


def team() -> SubagentEnvironment:
    """Return the environment: 1 for the right sum, and 0.5 for each subagent with the right sum of its half."""
    return SubagentEnvironment(
        # YOURS 1: who can be asked, and what each of them is told
        [Subagent(name="solver", system="You are a calculator. Reply with the number only.")],
        right_number,  # YOURS 2: the reward of the answer
        subagent_reward_fn=half_right,
        system="Delegate both halves, then add the results.",
        max_steps=2,
        max_agents=2,
    )


def half_right(task: Mapping[str, Any], prompt: str, answer: str) -> float:
    """Return a subagent's reward: 0.5 if it was given a half, and its last number is the sum of it."""
    halves = {f"{a} + {b} =": a + b for a, b in (task["numbers"][:2], task["numbers"][2:])}
    return 0.5 * (prompt in halves and last_number(answer) == halves[prompt])


class ShownHow(Agent):
    """Says what the model says; the task's own agent is shown the examples after its system message."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once; its reply is the action."""
        messages, first = [*policy.history, *observation.content], not policy.history
        if observation.agent == "agent":
            messages[1:1] = EXAMPLES
        chat = await policy.chat(messages, tools=observation.tools, max_tokens=80 if observation.tools and first else 8)
        return [chat], chat.reply


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, validation): 400 and 16 sums of four numbers from 1 to 9, all different."""
    drawn, found = random.Random(20), dict[str, dict[str, Any]]()
    while len(found) < 416:
        a, b, c, d = numbers = [drawn.randint(1, 9) for _ in range(4)]
        name = "+".join(map(str, numbers))
        prompt, answer = f"({a} + {b}) + ({c} + {d}) =", str(sum(numbers))
        found[name] = {"id": name, "prompt": prompt, "answer": answer, "numbers": numbers}
    tasks = list(found.values())  # YOURS 3: the tasks, JSON objects
    return tasks[16:], tasks[:16]


def job(seed: int, steps: int, model: str = "SmolLM2-135M-Instruct") -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 3e-5, "schedule": "linear", "warmup_steps": 1}
    policy = {"model": model, "max_context": 2048, "sampling": {"temperature": 0.7}, "optimizer": optimizer}
    return JobConfig.model_validate(
        {
            "name": "subagents",
            "seed": seed,
            "steps": steps,
            "policies": {"all": policy},
            "rollout": {"groups_per_step": 4, "group_size": 8},
            "algorithm": {"credit": "episode"},  # the agent earns from what its subagents get right, before it can add
            "evaluation": {"every_steps": 2},
        }
    )


def demonstrate(steps: int = 6, seed: int = 0, model: str = "SmolLM2-135M-Instruct") -> palestra.TrainResult:
    """Train, and score the held-out sums greedily every 2 steps."""
    training, validation = sums()
    rollout = RolloutSpec(environment=team, agents={"agent": ShownHow()})
    return palestra.train(rollout, training, job(seed, steps, model), validation_tasks=validation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2 learns to work with subagents.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
