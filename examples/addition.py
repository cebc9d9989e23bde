"""SmolLM2 learns to add: an agent that only speaks the OpenAI API trains the model behind it.

    python examples/addition.py [--steps 30] [--seed 0] [--resume]

Everything runs on this machine: a real pretrained model, a server that the agent talks to over HTTP, and GRPO.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

import openai

import palestra
from palestra import JobConfig, ModelEndpoint

SYSTEM = "You are a calculator. Reply with the number only."
agent = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=5)


async def rollout(task: dict[str, Any], endpoint: ModelEndpoint) -> palestra.RolloutResult:
    """One attempt at one sum: ask the model, compare its answer."""
    client = agent.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    reply = await client.chat.completions.create(
        model=endpoint.model,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{task['a']} + {task['b']} ="},
        ],
        max_tokens=12,
    )
    answer = reply.choices[0].message.content or ""
    return palestra.RolloutResult(reward=score(answer, task), metadata={"answer": answer})


def score(answer: str, task: dict[str, Any]) -> float:
    """1 if the last number of the answer is the sum, else 0."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == task["a"] + task["b"])


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, validation): sums of numbers from 1 to 20. 64 unordered pairs are held out, always the same ones."""
    pairs = [(a, b) for a in range(1, 21) for b in range(a, 21)]
    random.Random(20).shuffle(pairs)
    held_out, rest = pairs[:64], pairs[64:]
    validation = [{"id": f"{a}+{b}", "a": a, "b": b} for a, b in held_out]
    training = [{"id": f"{x}+{y}", "a": x, "b": y} for a, b in rest for x, y in sorted({(a, b), (b, a)})]
    return training, validation


def job(seed: int, steps: int) -> JobConfig:
    """What is trained, and how; everything else is a default."""
    return JobConfig.model_validate(
        {
            "name": "addition",
            "seed": seed,
            "steps": steps,
            "policies": {
                "calculator": {
                    "model": "SmolLM2-135M-Instruct",
                    "max_context": 512,
                    "optimizer": {"learning_rate": 3e-5, "schedule": "linear"},
                }
            },
            "rollout": {"groups_per_step": 16, "group_size": 6},
        }
    )


def demonstrate(steps: int = 30, seed: int = 0, resume: bool = False) -> None:
    """Train, then show what the model answered before and after."""
    training, validation = sums()
    result = palestra.train(rollout, training, job(seed, steps), validation_tasks=validation, resume=resume)
    print("\nheld-out sums, before and after (greedy):")
    for before, after in answers(result.run_dir):
        print(f"  {before['task']:>8} = {before['sum']:<3} {before['answer']!r:<42} {after['answer']!r}")


def answers(run_dir: Path, count: int = 6) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first and the last answers to some validation tasks, as the run recorded them."""
    scored = palestra.read_episodes(run_dir, "validation")
    shown = []
    for first in scored[:count]:
        last = [e for e in scored if e.task_id == first.task_id][-1]
        a, b = map(int, first.task_id.split("+"))
        both = [{"task": f"{a} + {b}", "sum": a + b, "answer": e.metadata["answer"]} for e in (first, last)]
        shown.append((both[0], both[1]))
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2 learns to add, on this machine.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.resume)
