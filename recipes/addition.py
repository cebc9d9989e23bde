"""Math with a reward that can be checked: SmolLM2-135M learns to add. `palestra demo` runs this file.

    python recipes/addition.py [--steps 36] [--seed 0] [--resume] [--model NAME] [--lora] [--vllm PYTHON]

The agent is a function that calls the model through the OpenAI client. It returns 1 for the right sum, and 0 for any
other answer and for one that is cut. 64 sums are held out, and answered before and after.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
from typing import Any

import openai

import palestra
from palestra import JobConfig, ModelEndpoint

SYSTEM = "You are a calculator. Reply with the number only."
agent = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=5)


async def rollout(task: dict[str, Any], endpoint: ModelEndpoint) -> palestra.RolloutResult:
    """Ask the model for one sum, and compare its answer."""
    client = agent.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    question = f"{task['a']} + {task['b']} ="  # YOURS 1: what the model is asked
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    (choice,) = (await client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=12)).choices
    answer, end = choice.message.content or "", choice.finish_reason
    return palestra.RolloutResult(reward=reward(task, answer, end), metadata={"answer": answer, "finish_reason": end})


def reward(task: dict[str, Any], answer: str, finish_reason: str) -> float:
    """Return 1 if the answer ends by itself and its last number is the sum, else 0; `train(reward=…)` takes it, too."""
    right = re.findall(r"\d+", answer)[-1:] == [str(task["a"] + task["b"])]  # YOURS 2: what is right
    return float(right and finish_reason == "stop")  # else the model unlearns to stop


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, validation): sums of numbers from 1 to 20, of which 64 unordered pairs are held out."""
    pairs = [(a, b) for a in range(1, 21) for b in range(a, 21)]  # YOURS 3: the tasks, JSON objects
    random.Random(20).shuffle(pairs)
    validation = [{"id": f"{a}+{b}", "a": a, "b": b} for a, b in pairs[:64]]
    training = [{"id": f"{x}+{y}", "a": x, "b": y} for a, b in pairs[64:] for x, y in sorted({(a, b), (b, a)})]
    return training, validation


def job(
    seed: int, steps: int, model: str = "SmolLM2-135M-Instruct", lora: bool = False, vllm: str | None = None
) -> JobConfig:
    """Return what is trained, and how; `vllm` is an interpreter of an environment with vLLM, which samples then."""
    optimizer = {"learning_rate": 3e-4 if lora else 3e-5, "schedule": "linear"}  # adapters start from zero
    policy = {"model": model, "max_context": 512, "optimizer": optimizer, "adapter": {"rank": 16} if lora else None}
    table: dict[str, Any] = {
        "name": "addition",
        "seed": seed,
        "steps": steps,
        "policies": {"calculator": policy},
        "rollout": {"groups_per_step": 16, "group_size": 6},
        "algorithm": {"minibatches": 2},  # two updates a step learn as much in fewer episodes
        "evaluation": {"every_steps": 12},
        "checkpoint": {"every_steps": 12},
        "engine": {"kind": "embedded"} if vllm is None else {"kind": "vllm", "python": vllm},
    }
    return JobConfig.model_validate(table)


def scenario() -> dict[str, Any]:
    """Return what `palestra compare` trains."""
    training, validation = sums()
    return {"rollout": rollout, "tasks": training, "validation_tasks": validation, "config": job(0, 1)}


def demonstrate(
    steps: int = 36,
    seed: int = 0,
    resume: bool = False,
    model: str = "SmolLM2-135M-Instruct",
    lora: bool = False,
    vllm: str | None = None,
) -> palestra.TrainResult:
    """Train, then show what the model answered before and after."""
    training, validation = sums()
    config = job(seed, steps, model, lora, vllm)
    result = palestra.train(rollout, training, config, validation_tasks=validation, resume=resume)
    print_change(result)
    return result


def print_change(result: palestra.TrainResult, shown: int = 10) -> None:
    """Print how many held-out sums were right before and after, some of those that changed, and what lies on disk."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for episode in palestra.read_episodes(result.run_dir, "validation"):
        failed = "cut" if episode.metadata["finish_reason"] == "length" else "wrong"
        word = "right" if sum((episode.rewards or {}).values()) > 0 else failed
        answers.setdefault(episode.task_id, []).append((episode.metadata["answer"], word))
    before, after = (sum(each[place][1] == "right" for each in answers.values()) for place in (0, -1))
    changed = [(task, each[0], each[-1]) for task, each in answers.items() if each[0][1] != each[-1][1]]
    print(f"\nheld-out sums, greedy: {before} of {len(answers)} right before, {after} after; {len(changed)} changed:")
    for task, first, last in changed[:shown]:
        old, new = (f"{shortened(repr(answer))} {word}" for answer, word in (first, last))
        print(f"  {task:>8} = {sum(map(int, task.split('+'))):<3} {old:<36} {new}")
    folder = shlex.quote(str(result.run_dir))
    print(f"all of them: palestra episodes {folder} --kind validation --limit {len(answers)}")
    size = sum(file.stat().st_size for file in result.run_dir.rglob("*") if file.is_file()) / 1e9
    print(f"\n{size:.1f} GB of checkpoints and records are on disk; rm -r {folder} removes them")


def shortened(text: str, most: int = 28) -> str:
    """Return the text, or its beginning and an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2 learns to add, on this machine.")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16 in place of all weights")
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM, which samples then")
    demonstrate(**vars(parser.parse_args()))
