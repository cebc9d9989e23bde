"""A web page by its pixels: a model that sees, of random weights, clicks on the button of MiniWoB's page click-test.

    python recipes/click_by_sight.py [--steps 48] [--seed 0] [--model tiny-random-vision] [--blindfolded]

Needs Chromium, playwright and MiniWoB's pages: `palestra environments` says what is missing. On the page, 160 x 160
pixels, stands a button of 35 to 100 pixels. The model is shown a screenshot in black and white, and names one of
sixteen cells; the mouse clicks in the cell's middle. One click is the whole episode, and worth 1 on the button. To a
model that sees nothing all pages are alike, which `--blindfolded` shows: the same model, for which every page is black.
What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import numpy as np
from PIL import Image

import palestra
from palestra import Agent, Chat, ChatMessage, JobConfig, Observation, PolicyHandle, RolloutSpec, text_message
from palestra_screens import MiniWoB

PAGE, GROUPS = "click-test", 32  # YOURS 1: a page of MiniWoB on which one click is enough; problems of a step
WIDE, HIGH, TOP = 160, 210, 50  # pixels of a page, and of the yellow line with the task, which takes no clicks
PAPER = 250  # the darkest grey that is shown as black; buttons have 239
SYSTEM = "The page has sixteen cells, a to p, line by line. Reply with the one to click on."
# YOURS 2: what the model may answer, and where the mouse clicks then
CELLS = {chr(ord("a") + k): (20 + 40 * (k % 4), TOP + 20 + 40 * (k // 4)) for k in range(16)}
HELD_OUT = 1_000_000_000  # the first seed that is held out


class Screen(MiniWoB):
    """A page as a picture, on which the agent acts by a line such as `click_at 20 70`."""

    def __init__(self, blindfolded: bool = False) -> None:
        super().__init__(observation="screenshot", actions="text", max_steps=1, timeout_seconds=60.0)
        self.blindfolded = blindfolded

    async def observe(self) -> Any:
        """Return what the page shows below the task, uint8 [160, 160]: 0 where it is as light as paper, 255 elsewhere.

        A button is light grey on white, which a model of random weights hardly tells apart.
        """
        if self.blindfolded:
            return np.zeros((HIGH - TOP, WIDE), np.uint8)
        page = np.asarray(Image.open(io.BytesIO(await self.screenshot())).convert("L"))
        return np.where(page[TOP:] < PAPER, 255, 0).astype(np.uint8)


class Pointer(Agent):
    """Asks the model for a cell, and clicks in its middle."""

    async def step(self, observation: Observation, policy: PolicyHandle) -> tuple[list[Chat], ChatMessage]:
        """Call the model once, and return the environment's command for the cell that it names."""
        chat = await policy.chat((*policy.history, *observation.content), choices=tuple(CELLS), max_tokens=2)
        x, y = CELLS[chat.reply.text]
        return [chat], text_message("assistant", f"click_at {x} {y}")


def problems(first: int, count: int) -> list[dict[str, Any]]:
    """Return tasks with the seeds from `first` on."""
    return [{"id": f"{PAGE}-{seed}", "page": PAGE, "seed": seed} for seed in range(first, first + count)]


def held_out() -> list[dict[str, Any]]:
    """Return problems that are not trained on."""
    return problems(HELD_OUT, 64)


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    policy = {"model": model, "vision": "trained", "max_context": 512, "optimizer": optimizer}  # YOURS 3
    return JobConfig.model_validate(
        {
            "name": "click-by-sight",
            "seed": seed,
            "steps": steps,
            "policies": {"pointer": policy},
            "rollout": {"groups_per_step": GROUPS, "group_size": 8},
            "algorithm": {"loss_agg_mode": "token-mean", "entropy_coefficient": 0.1, "epochs": 4},
            "evaluation": {"every_steps": max(steps // 4, 1)},
            "checkpoint": {"every_steps": steps},
            "engine": {"dtype": "float32", "threads": 1},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(
    steps: int = 48, seed: int = 0, model: str = "tiny-random-vision", blindfolded: bool = False
) -> palestra.TrainResult:
    """Train; problems that are not trained on are played greedily after every fourth of the steps."""
    play = RolloutSpec(environment=lambda: Screen(blindfolded), agents={"agent": Pointer()}, system=SYSTEM)
    # Another seed trains on other problems, too.
    training, config = problems(100_000 * seed, GROUPS * steps), job(seed, steps, model)
    return palestra.train(play, training, config, validation_tasks=held_out(), concurrency=16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model that sees clicks on a web page.")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random-vision")
    parser.add_argument("--blindfolded", action="store_true", help="every page is black")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model, arguments.blindfolded)
