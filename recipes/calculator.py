"""Tools: SmolLM2-135M learns to call a calculator in the first turn, and to say the number in the second.

    python recipes/calculator.py [--steps 6] [--seed 0] [--model SmolLM2-135M-Instruct] [--in-the-head]

Products of three digits by two, which a model of 135M parameters can't do in its head; `--in-the-head` scores that, and
trains nothing. The model has hardly ever seen a call: two worked examples stand in front of every question. A typed
function of your own becomes a tool with `@palestra.tool`. What it prints is in README.md.
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
    """Return a worked example: question, call, result, answer."""
    call = {"id": question, "function": {"name": "calculator", "arguments": f'{{"expression": "{question}"}}'}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": f"{question} ="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": question, "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return [ChatMessage.model_validate(message) for message in conversation]


EXAMPLES = (*example("12 * 34", "408"), *example("205 * 46", "9430"))  # YOURS 2: how the tools are used


class ShownHow(Agent):
    """Says what the model says, which is shown the examples after the system message."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once; its reply is the action."""
        system, *conversation = (*policy.history, *observation.content)
        chat = await policy.chat((system, *EXAMPLES, *conversation), tools=observation.tools, max_tokens=48)
        return [chat], chat.reply


def world() -> CalculatorEnvironment:
    """Return the environment; `ToolEnvironment([tool, …], reward, system=…)` is the one for tools of your own."""
    return CalculatorEnvironment(system="You call the calculator.", max_steps=2)  # YOURS 1: tools and reward


def products() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, validation): 500 and 48 products of a number from 101 to 999 and one from 11 to 99."""
    pairs = random.Random(20).sample([(a, b) for a in range(101, 1000) for b in range(11, 100)], 548)
    tasks = [{"id": f"{a}*{b}", "prompt": f"{a} * {b} =", "answer": str(a * b)} for a, b in pairs]  # YOURS 3
    return tasks[48:], tasks[:48]


def job(seed: int, steps: int, model: str = "SmolLM2-135M-Instruct") -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 3e-5, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "calculator",
            "seed": seed,
            "steps": steps,
            "policies": {"calculator": {"model": model, "max_context": 2048, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 8, "group_size": 6},
            "evaluation": {"every_steps": 2},
        }
    )


def demonstrate(steps: int = 6, seed: int = 0, model: str = "SmolLM2-135M-Instruct") -> palestra.TrainResult:
    """Train, and score the held-out products greedily every 2 steps."""
    training, validation = products()
    play = RolloutSpec(environment=world, agents={"agent": ShownHow()})
    return palestra.train(play, training, job(seed, steps, model), validation_tasks=validation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2 learns to use a calculator.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--in-the-head", action="store_true", help="score the untrained model without the tool")
    arguments = parser.parse_args()
    if arguments.in_the_head:
        play = RolloutSpec(environment=Arithmetic, max_tokens=12)
        found = palestra.evaluate(play, products()[1], job(0, 1, arguments.model))
        print(f"in the head, untrained: {found.mean:.2f} of {len(found.outcomes)} products")
    else:
        demonstrate(arguments.steps, arguments.seed, arguments.model)
