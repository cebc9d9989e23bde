"""Web pages in a browser: a model learns to click what a page asks for (MiniWoB++).

    python recipes/miniwob.py [--steps 20] [--seed 0] [--model SmolLM2-135M-Instruct]

Needs Chromium, playwright and MiniWoB's pages: `palestra environments` says what is missing. The model reads a page as
lines, each control with a number, and replies with one line such as `click 3`; what it samples is held to such lines.
Each problem comes from a seed, and the seeds that are held out are in no training task.
"""

from __future__ import annotations

import argparse
from typing import Any

import palestra
from palestra import JobConfig, MiniWoB, ModelAgent, RolloutSpec

PAGES = ("click-button",)  # YOURS 1: pages of MiniWoB; `palestra environments miniwob/click-button` shows one
CLICKS = ModelAgent(choices=tuple(f"click {number}" for number in range(1, 10)))  # YOURS 2: what it may do
SYSTEM = "You see a task and a web page. Reply with click and the number of what the task asks for."


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 2e-5}
    return JobConfig.model_validate(
        {
            "name": "miniwob",
            "seed": seed,
            "steps": steps,
            "policies": {"policy": {"model": model, "max_context": 1024, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 4, "group_size": 8},
        }
    )


def problems(first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks with the seeds from `first` on, of each page in turn."""
    chosen = [(PAGES[seed % len(PAGES)], seed) for seed in range(first, first + count)]
    return [{"id": f"{page}-{seed}", "page": page, "seed": seed} for page, seed in chosen]


def demonstrate(steps: int = 20, seed: int = 0, model: str = "SmolLM2-135M-Instruct") -> palestra.TrainResult:
    """Train, and score greedily on seeds that are held out."""
    play = RolloutSpec(
        environment=lambda: MiniWoB(actions="text", max_steps=3), agents={"agent": CLICKS}, system=SYSTEM
    )
    held_out = problems(1_000_000, 16)
    tasks, config = problems(0, 4 * steps), job(seed, steps, model)
    return palestra.train(play, tasks, config, validation_tasks=held_out, concurrency=8)  # eight pages at a time


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model learns to click what a web page asks for.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")  # YOURS 3: the model
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
