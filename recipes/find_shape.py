"""Pictures over several turns: a model that sees, of random weights, looks around for a shape and clicks on it.

    python recipes/find_shape.py [--steps 20] [--seed 0] [--model tiny-random-vision] [--named] [--blindfolded]

A canvas has four windows, with a disc, a square, a triangle and a cross, one in each. The model is told the name of the
shape that is wanted and shown one window a look; it clicks on this window (c), or looks at the next one (n), of which
there are four in all. A click ends the episode, and is worth 1 on the wanted shape. Who clicks without seeing is right
once in four times, which `--blindfolded` shows: the same model, for which every window is black. The cross is wanted on
every canvas, or with `--named` any of the four, so that the model has to learn which word means which shape as well.
What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import palestra
from palestra import Environment, JobConfig, ModelAgent, RolloutSpec

SHAPES = ("disc", "square", "triangle", "cross")
WANTED = ("cross",)  # YOURS 1: what is asked for without `--named`
SIDE, GROUPS = 32, 16  # pixels of a window, canvases of a step
EYE = ModelAgent(choices=("n", "c"), max_tokens=2)  # YOURS 2: what the model may answer


def drawn(shape: str, x: float, y: float, radius: float) -> Any:
    """Return a black window with one white shape as an array, uint8 [SIDE, SIDE]."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    across, down = (columns - x) / radius, (rows - y) / radius
    inside = np.maximum(abs(across), abs(down)) <= 1
    filled = {
        "disc": across**2 + down**2 <= 1,
        "square": inside,
        "triangle": inside & (2 * abs(across) <= down + 1),
        "cross": inside & (np.minimum(abs(across), abs(down)) <= 0.3),
    }
    return np.where(filled[shape], 255, 0).astype(np.uint8)


class Canvas(Environment):
    """A shape in each of four windows: a look shows the next one, and a click ends the episode."""

    max_steps = len(SHAPES)
    blocking = False  # `step` is quick; otherwise it runs in a thread
    reusable = True  # `reset` may be called again

    def __init__(self, blindfolded: bool = False, named: bool = False) -> None:
        self.blindfolded, self.names = blindfolded, SHAPES if named else WANTED

    def reset(self, task: Any) -> tuple[list[Any], dict[str, Any]]:
        """Draw the canvas of the task's seed; return the first window and the name, and information for people."""
        draw = np.random.default_rng(task["seed"])
        self.looks, self.shapes, self.wanted = 1, draw.permutation(SHAPES).tolist(), str(draw.choice(self.names))
        self.places = draw.uniform((13, 13, 9), (18, 18, 12), (len(SHAPES), 3)).tolist()  # x, y and radius
        return self.seen(), {"shapes": self.shapes, "wanted": self.wanted}

    def seen(self) -> list[Any]:
        """Return the present window, and the name of what is looked for."""
        window = drawn(self.shapes[self.looks - 1], *self.places[self.looks - 1])
        return [np.zeros_like(window) if self.blindfolded else window, self.wanted]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Look at the next window, or click on this one."""
        if action == "n" and self.looks < len(SHAPES):
            self.looks += 1
            return self.seen(), 0.0, False, False, {}
        right = action == "c" and self.shapes[self.looks - 1] == self.wanted
        return "", float(right), True, False, {"looks": self.looks}


def canvases(name: str, first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks: the seeds of canvases."""
    return [{"id": f"{name}{seed}", "seed": seed} for seed in range(first, first + count)]


def held_out() -> list[dict[str, Any]]:
    """Return canvases that are not trained on."""
    return canvases("fresh", 0, 100)


def job(seed: int, steps: int, model: str, named: bool) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    entropy = 0.1 if named else 0.05  # with four names it takes longer until looking around pays
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    policy = {"model": model, "vision": "trained", "max_context": 512, "optimizer": optimizer}  # YOURS 3
    return JobConfig.model_validate(
        {
            "name": "find-shape",
            "seed": seed,
            "steps": steps,
            "policies": {"finder": policy},
            "rollout": {"groups_per_step": GROUPS, "group_size": 8},
            "algorithm": {"loss_agg_mode": "token-mean", "entropy_coefficient": entropy, "epochs": 4},
            "evaluation": {"every_steps": max(steps // 5, 1)},
            "checkpoint": {"every_steps": steps},
            "engine": {"dtype": "float32", "threads": 1},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(
    steps: int = 20, seed: int = 0, model: str = "tiny-random-vision", named: bool = False, blindfolded: bool = False
) -> palestra.TrainResult:
    """Train; canvases that are not trained on are played greedily after every fifth of the steps."""
    play = RolloutSpec(environment=lambda: Canvas(blindfolded, named), agents={"agent": EYE})
    training, config = canvases("train", 10_000, GROUPS * steps), job(seed, steps, model, named)
    return palestra.train(play, training, config, validation_tasks=held_out(), concurrency=64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model that sees looks for a shape.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random-vision")
    parser.add_argument("--named", action="store_true", help="any of the four shapes may be wanted")
    parser.add_argument("--blindfolded", action="store_true", help="every window is black")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.named, arguments.blindfolded)
