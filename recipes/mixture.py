"""Three sets of tasks in one job, with weights, and a curriculum that finds the tasks which can be learned.

    python recipes/mixture.py [--steps 12] [--seed 0] [--model tiny-random] [--plain]

The model answers with one of four words. `colours` has one right word for some tasks; `moods` takes one of two; of
`riddles` no answer is ever right. Each set has a fixed share of the groups. Within its
share, the curriculum plays what is solved sometimes; `--plain` plays everything in turn instead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import palestra
from palestra import JobConfig, ModelAgent, RolloutSpec, TaskEnvironment

WORDS = ("red", "green", "blue", "none")
PROMPTS = {"said": "Say {word}: {n}", "mood": "A mood, {n}", "riddle": "A riddle, {n}"}
SETS = {"colours": {"said": 12, "riddle": 24}, "moods": {"mood": 12}, "riddles": {"riddle": 12}}
WEIGHTS = {"colours": 5, "moods": 2, "riddles": 1}  # YOURS 1: shares of the groups


def tasks(name: str, first: int = 0, share: float = 1.0) -> list[dict[str, Any]]:
    """Return the tasks of a set, with numbers from `first` on."""  # YOURS 2: any JSON objects
    rows = []
    for kind, count in SETS[name].items():
        for n in range(first, first + round(share * count)):
            right = {"said": [WORDS[n % 3]], "mood": ["green", "blue"], "riddle": []}[kind]
            prompt = PROMPTS[kind].format(word=WORDS[n % 3], n=n)
            rows.append({"id": f"{kind}-{n}", "prompt": prompt, "right": right})
    return rows


def right(task: dict[str, Any], answer: str) -> float:
    """Return whether the answer is right."""  # YOURS 3: the reward
    return float(answer in task["right"])


def job(folder: Path, seed: int, steps: int, model: str, plain: bool) -> JobConfig:
    """Return what is trained; everything else is a default."""
    environments = []
    for name, weight in WEIGHTS.items():
        files = {"train": folder / f"{name}.jsonl", "validation": folder / f"{name} held out.jsonl"}
        for file, rows in zip(files.values(), (tasks(name), tasks(name, 600, 0.5)), strict=True):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        environments.append({"id": name, "weight": weight, "tasks": files})
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "mixture",
            "seed": seed,
            "steps": steps,
            "environments": environments,
            "curriculum": None if plain else {"min_reward": 1.0},
            "policies": {"speaker": {"model": model, "max_context": 128, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 8, "group_size": 8},
            "evaluation": {"every_steps": max(steps // 4, 1)},
            "engine": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(
    steps: int = 12, seed: int = 0, model: str = "tiny-random", plain: bool = False
) -> palestra.TrainResult:
    """Train, and print what each set of tasks has taught."""
    play = RolloutSpec(
        environment=lambda: TaskEnvironment(right), agents={"agent": ModelAgent(choices=WORDS, max_tokens=16)}
    )
    with tempfile.TemporaryDirectory() as folder:
        done = palestra.train(play, config=job(Path(folder), seed, steps, model, plain))
    trained = done.metrics[1:]
    for name in SETS:
        shares = [row[key] for row in trained if (key := f"train/environments/{name}/informative_share") in row]
        before, after = (done.metrics[place][f"validation/environments/{name}/reward_mean"] for place in (0, -1))
        print(f"{name}: informative {sum(shares) / len(shares):.2f}, held out: {before:.2f} right, then {after:.2f}")
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns from a mixture of tasks.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--plain", action="store_true", help="all tasks in turn, without a curriculum")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.plain)
