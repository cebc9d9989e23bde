"""Web pages in a browser: a model learns to click what a page asks for (MiniWoB++).

    python recipes/miniwob.py [--steps 20] [--seed 0] [--model SmolLM2-135M-Instruct] [--page click-button]

Needs Chromium, playwright and MiniWoB's pages: `palestra environments` says what is missing. The model reads a page as
lines, each control with a number, and replies with one line such as `click 3`. Each problem comes from a seed, and the
seeds that are held out are in no training task. What it prints is in README.md.
"""

from __future__ import annotations

import argparse

import palestra
from palestra import JobConfig

PAGE = "click-button"  # YOURS 1: a page of MiniWoB, or "" for thirty of them
SYSTEM = """You see a web page. Each line with a number is something to act on. Reply with one line:
click NUMBER
type NUMBER TEXT
select NUMBER OPTION
For example, to click on [3] button Yes, reply: click 3"""  # YOURS 2: what the model is told about its actions


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    return JobConfig.model_validate(
        {
            "name": "miniwob",
            "seed": seed,
            "steps": steps,
            "environment": {
                "settings": {"actions": "text", "max_steps": 3},
                "system": SYSTEM,
                "train_tasks": 8 * steps,
                "validation_tasks": 32,
                "max_concurrency": 8,  # pages that are open at the same time
            },
            "policies": {
                "policy": {
                    "model": model,
                    "max_context": 2048,
                    "sampling": {"max_tokens": 12},
                    "optimizer": {"learning_rate": 2e-5},
                }
            },
            "rollout": {"groups_per_step": 8, "group_size": 8},
        }
    )


def demonstrate(
    steps: int = 20, seed: int = 0, model: str = "SmolLM2-135M-Instruct", page: str = PAGE
) -> palestra.TrainResult:
    """Train, and score greedily on seeds that are held out."""
    name = f"miniwob/{page}" if page else "miniwob"
    return palestra.train(environment=name, config=job(seed, steps, model))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model learns to act on web pages.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")  # YOURS 3: a model that follows instructions
    parser.add_argument("--page", default=PAGE)
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.page)
