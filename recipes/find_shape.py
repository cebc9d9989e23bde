"""Pictures over several turns: a model that sees, of random weights, finds the named shape and clicks on it.

    python recipes/find_shape.py [--steps 80] [--seed 0] [--model tiny-random-vision] [--blindfolded]

A canvas has four windows, with a disc, a square, a triangle and a cross, one in each. The model is shown one window a
look and is told a name; it clicks on a quarter of this window (1 to 4), or looks at the next one (n). A click ends the
episode, and is worth 1 on the shape that has the name. Who clicks without seeing is right once in sixteen times, which
`--blindfolded` shows: the same model, for which every window is white. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import palestra
from palestra import Environment, JobConfig, ModelAgent, RolloutSpec

SHAPES = ("disc", "square", "triangle", "cross")
SIDE, LOOKS, GROUPS = 32, 4, 24  # pixels of a window, windows of a canvas, canvases of a step
EYE = ModelAgent(choices=("n", "1", "2", "3", "4"), max_tokens=2)  # YOURS 2: what the model may answer


def drawn(shape: str, x: float, y: float, radius: float) -> Any:
    """Return a white window with one black shape as an array, uint8 [SIDE, SIDE]."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    across, down = (columns - x) / radius, (rows - y) / radius
    inside = np.maximum(abs(across), abs(down)) <= 1
    filled = {
        "disc": across**2 + down**2 <= 1,
        "square": inside,
        "triangle": inside & (2 * abs(across) <= down + 1),
        "cross": inside & (np.minimum(abs(across), abs(down)) <= 0.3),
    }
    return np.where(filled[shape], 0, 255).astype(np.uint8)


class Canvas(Environment):  # YOURS 1: what is seen, and what is worth something
    """Four windows with a shape in each; a look shows the next one, and a click ends the episode."""

    max_steps = LOOKS
    blocking = False  # `step` is quick; otherwise it runs in a thread
    reusable = True

    def __init__(self, blindfolded: bool = False) -> None:
        self.blindfolded = blindfolded

    def reset(self, task: Any) -> tuple[list[Any], dict[str, Any]]:
        """Draw the canvas of the task's seed; return the first window and the name, and information for people."""
        draw = np.random.default_rng(task["seed"])
        self.window, self.shapes = 0, draw.permutation(SHAPES).tolist()
        self.quarters, self.name = draw.integers(4, size=LOOKS).tolist(), str(draw.choice(SHAPES))
        self.places = draw.uniform(-1.5, 1.5, (LOOKS, 2)).tolist()
        self.radii = draw.uniform(4.5, 6.0, LOOKS).tolist()
        return self.seen(), {"shapes": self.shapes, "name": self.name}

    def seen(self) -> list[Any]:
        """Return the present window, and the name of what is looked for."""
        (down, right), (by_x, by_y) = divmod(self.quarters[self.window], 2), self.places[self.window]
        centre = SIDE * (2 * right + 1) / 4 + by_x, SIDE * (2 * down + 1) / 4 + by_y
        window = drawn(self.shapes[self.window], *centre, self.radii[self.window])
        return [np.full_like(window, 255) if self.blindfolded else window, self.name]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Look at the next window, or click on a quarter of this one."""
        if action == "n" and self.window + 1 < LOOKS:
            self.window += 1
            return self.seen(), 0.0, False, False, {}
        right = self.shapes[self.window] == self.name and action == str(self.quarters[self.window] + 1)
        return "", float(right), True, False, {"looks": self.window + 1}


def canvases(name: str, first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks: the seeds of canvases."""
    return [{"id": f"{name}{seed}", "seed": seed} for seed in range(first, first + count)]


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    policy = {"model": model, "vision": "trained", "max_context": 512, "optimizer": {"learning_rate": 1e-3}}  # YOURS 3
    return JobConfig.model_validate(
        {
            "name": "find-shape",
            "seed": seed,
            "steps": steps,
            "policies": {"finder": policy},
            "rollout": {"groups_per_step": GROUPS, "group_size": 16},
            "algorithm": {"loss_agg_mode": "token-mean", "entropy_coefficient": 0.03},
            "evaluation": {"every_steps": max(steps // 5, 1)},
            "checkpoint": {"every_steps": steps},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(
    steps: int = 80, seed: int = 0, model: str = "tiny-random-vision", blindfolded: bool = False
) -> palestra.TrainResult:
    """Train; 200 canvases that are not trained on are played greedily every fifth of the steps."""
    play = RolloutSpec(environment=lambda: Canvas(blindfolded), agents={"agent": EYE})
    training, held_out = canvases("train", 10_000, GROUPS * steps), canvases("fresh", 0, 200)
    return palestra.train(play, training, job(seed, steps, model), validation_tasks=held_out, concurrency=128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model that sees finds shapes.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random-vision")
    parser.add_argument("--blindfolded", action="store_true")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.blindfolded)
