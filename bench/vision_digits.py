"""Whether a model that sees learns to read: handwritten digits of scikit-learn, by reinforcement.

    python bench/vision_digits.py [--runs http-0 environment-0 blank-0 …] [--steps 70]

Needs scikit-learn. 1,437 of the 1,797 pictures are trained on; the other 360 are held out, and answered greedily. The
model is of Idefics3's architecture with random weights (0.45 million, 4 embeddings a picture, tower trained). `http`:
its agent sends a PNG through the OpenAI client, and is paid 1 for the right digit, which is one token, one of ten by a
grammar. `environment`: the same digits as a `palestra.Environment` whose observation is an array. `blank`: the
environment with a white picture in the place of each; what the model learns otherwise, it sees. Prints a line a run,
writes a part of docs/learning.md, and exits with 1 if a run is on the wrong side of its target.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
from sight import Kind, Trial, main

import palestra
from palestra import Environment, JobConfig, ModelAgent, ModelEndpoint, RolloutSpec
from palestra.models.vision.tiny import TILE, make_tiny_vision
from palestra.pictures.pixels import encode_picture

TRAINED = 1437  # pictures, of 1797
GROUPS, SAMPLES = 32, 8  # pictures of a step, and answers to each
CONCURRENT = 16  # episodes: with more, the connection pools of HTTP clients take most of the time
DIGITS = tuple("0123456789")
agent = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=5)


@dataclass(frozen=True)
class Digits:
    """The pictures, 8 x 8 in 17 shades of grey, and what they show."""

    images: Any  # [1797, 8, 8]
    target: Any  # [1797]


@lru_cache(maxsize=1)
def digits() -> Digits:
    """Return scikit-learn's handwritten digits, which come with the package."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return Digits(found.images, found.target)


def pixels(number: int | None) -> Any:
    """Return a digit as an array, uint8 [32, 32]; None: a white picture."""
    if number is None:
        return np.full((32, 32), 255, np.uint8)
    return np.kron((digits().images[number] * 255 / 16).astype(np.uint8), np.ones((4, 4), np.uint8))


@lru_cache(maxsize=4096)
def picture(number: int) -> str:
    """Return the data URL of a digit as a PNG."""
    return f"data:image/png;base64,{base64.b64encode(encode_picture(pixels(number))).decode()}"


async def rollout(task: dict[str, Any], endpoint: ModelEndpoint) -> palestra.RolloutResult:
    """Show the model one digit, and pay for the right answer."""
    client = agent.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    content = [{"type": "image_url", "image_url": {"url": picture(task["number"])}}]
    messages: Any = [{"role": "user", "content": content}]
    reply = await client.chat.completions.create(
        model=endpoint.model,
        messages=messages,
        max_tokens=1,
        extra_body={"structured_outputs": {"choice": list(DIGITS)}},
    )
    answer = reply.choices[0].message.content or ""
    return palestra.RolloutResult(reward=float(answer == str(task["digit"])), metadata={"answer": answer})


class Reading(Environment):
    """One picture, one answer."""

    max_steps = 1
    blocking = False
    reusable = True

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def reset(self, task: Any) -> tuple[Any, dict[str, Any]]:
        """Show the picture of the task, or a white one in its place."""
        self.digit = str(task["digit"])
        return pixels(None if self.blank else task["number"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pay for the right answer."""
        return "", float(action == self.digit), True, False, {}


def tasks() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, validation): each picture once, by a split that is always the same."""
    order = np.random.default_rng(20).permutation(len(digits().target)).tolist()
    made = [{"id": str(k), "number": k, "digit": int(digits().target[k])} for k in order]
    return made[:TRAINED], made[TRAINED:]


def chance() -> float:
    """Return the share of the held-out pictures that show their most frequent digit: the most without seeing."""
    _, held_out = tasks()
    return float(np.bincount([task["digit"] for task in held_out]).max() / len(held_out))


def job(model: Path, run: Path, seed: int, steps: int) -> JobConfig:
    """Return what is trained, and how."""
    return JobConfig.model_validate(
        {
            "name": "digits",
            "seed": seed,
            "steps": steps,
            "run_dir": str(run),
            "policies": {
                "reader": {
                    "model": str(model),
                    "max_context": 64,
                    "vision": "trained",
                    "sampling": {"max_tokens": 1},
                    "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
                }
            },
            "algorithm": {"name": "grpo", "entropy_coefficient": 0.1, "epochs": 4},
            "rollout": {"groups_per_step": GROUPS, "group_size": SAMPLES},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},
            "trainer": {"dtype": "float32", "threads": 1},
            "evaluation": {"every_steps": max(steps // 5, 1)},
            "checkpoint": {"every_steps": steps},
        }
    )


def play(kind: str, seed: int, steps: int, run: Path) -> palestra.TrainResult:
    """Train one model, and answer the held-out pictures before, on the way and after."""
    training, held_out = tasks()
    model = run.parent / "model"
    make_tiny_vision(model, width=128, longest=TILE, splits=False)
    config = job(model, run, seed, steps)
    played: Any = rollout
    if kind != "http":
        agents = {"agent": ModelAgent(choices=DIGITS, max_tokens=1)}
        played = RolloutSpec(environment=lambda: Reading(kind == "blank"), agents=agents)
    return palestra.train(played, training, config, validation_tasks=held_out, concurrency=CONCURRENT)


ABOUT = f"""
`bench/vision_digits.py`: {{steps}} steps of {GROUPS} pictures x {SAMPLES} answers, GRPO, 4 epochs, a bonus of entropy
of 0.1, a model of Idefics3's architecture with random weights (0.45 million), tower trained, a learning rate that falls
from 1e-3 to 0. 1,437 of scikit-learn's 1,797 handwritten digits are trained on; the other 360 are answered greedily.
The answer is one of ten tokens by a grammar, for the untrained model too. A model that sees nothing gives all pictures
the same greedy answer, and is right for {{chance:.3f}} of them at most, the share of the most frequent digit.
"""


if __name__ == "__main__":
    sys.exit(
        main(
            Trial(
                script="vision_digits",
                name="vision_digits",
                heading="Handwritten digits: a model that sees, from nothing",
                about=ABOUT,
                measure="held-out digits read",
                steps=70,
                kinds={
                    "http": Kind(label="over HTTP", about="Over HTTP the agent sends a PNG through the OpenAI client."),
                    "environment": Kind(
                        label="as an environment", about="As an environment, `reset` returns an array."
                    ),
                    "blank": Kind(
                        label="white pictures",
                        about="With white pictures, the same model is trained as long in the environment.",
                    ),
                },
                blind="blank",
                runs=[*((kind, seed) for kind in ("http", "environment") for seed in range(3)), ("blank", 0)],
                target=0.8,
                chance=chance,
                play=play,
            )
        )
    )
