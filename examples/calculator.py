"""SmolLM2 learns to use a calculator: a call in the first turn, the number it brought in the second.

    python examples/calculator.py [--steps 6] [--seed 0] [--in-the-head]

Products of three digits by two, which a model of 135M parameters can't do in its head; `--in-the-head` scores that, and
trains nothing. It has hardly ever seen a call, either: two worked examples are in front of every question.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import palestra
from palestra import (
    Agent,
    Arithmetic,
    CalculatorEnvironment,
    Chat,
    ChatMessage,
    JobConfig,
    Observation,
    PolicyHandle,
    RolloutSpec,
)


def example(question: str, answer: str) -> list[ChatMessage]:
    """How it is done."""
    call = {"id": question, "function": {"name": "calculator", "arguments": f'{{"expression": "{question}"}}'}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": f"{question} ="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": question, "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return [ChatMessage.model_validate(message) for message in conversation]


EXAMPLES = (*example("12 * 34", "408"), *example("205 * 46", "9430"))


class ShownHow(Agent):
    """Says what the model says, which is shown the examples after the system message."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """See `Agent`."""
        system, *conversation = (*policy.history, *observation.content)
        chat = await policy.chat((system, *EXAMPLES, *conversation), tools=observation.tools, max_tokens=48)
        return [chat], chat.reply


def products() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, validation): 500 and 48 products of a number from 101 to 999 and one from 11 to 99, all different."""
    pairs = random.Random(20).sample([(a, b) for a in range(101, 1000) for b in range(11, 100)], 548)
    tasks = [{"id": f"{a}*{b}", "prompt": f"{a} * {b} =", "answer": str(a * b)} for a, b in pairs]
    return tasks[48:], tasks[:48]


def job(seed: int, steps: int) -> JobConfig:
    """What is trained, and how; everything else is a default."""
    return JobConfig.model_validate(
        {
            "name": "calculator",
            "seed": seed,
            "steps": steps,
            "policies": {
                "calculator": {
                    "model": "SmolLM2-135M-Instruct",
                    "max_context": 1024,
                    "optimizer": {"learning_rate": 3e-5, "schedule": "linear"},
                }
            },
            "rollout": {"groups_per_step": 8, "group_size": 6},
            "evaluation": {"every_steps": 2},
        }
    )


def demonstrate(steps: int = 6, seed: int = 0) -> palestra.TrainResult:
    """Train, and score the held-out products greedily every 2 steps."""
    training, validation = products()
    play = RolloutSpec(
        environment=lambda: CalculatorEnvironment(system="You call the calculator.", max_steps=2),
        agents={"agent": ShownHow()},
    )
    return palestra.train(play, training, job(seed, steps), validation_tasks=validation)


def in_the_head() -> float:
    """Score what the untrained model makes of the held-out products without the tool."""
    _, validation = products()
    found = palestra.evaluate(RolloutSpec(environment=Arithmetic, max_tokens=12), validation, job(0, 1))
    assert found.mean is not None
    print(f"in the head, untrained: {found.mean:.2f} of {len(validation)} products")
    return found.mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2 learns to use a calculator.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-the-head", action="store_true", help="score the untrained model without the tool")
    arguments = parser.parse_args()
    if arguments.in_the_head:
        in_the_head()
    else:
        demonstrate(arguments.steps, arguments.seed)
