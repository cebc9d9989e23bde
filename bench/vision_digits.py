"""Whether a model that sees learns to read: handwritten digits of scikit-learn, by reinforcement over HTTP.

    python bench/vision_digits.py [--seeds 0 1 2] [--steps 100] [--blank] [--groups 64] [--target 0.8]

Needs scikit-learn. 1,437 of the 1,797 pictures are trained on; the other 360 are held out, and answered greedily before
the first and after the last step. The model is of Idefics3's architecture with random weights (0.45 million, 4
embeddings a picture, tower trained). Its agent sends a PNG through the OpenAI client, and is paid 1 for the right
digit, which is one token, one of ten by a grammar. With `--blank` the same model gets a white picture in place of each,
and must stay at chance: what it learns otherwise, it sees. Prints a line a seed, and exits with 1 if one is on the
wrong side of the target.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import openai

import palestra
from palestra import JobConfig, ModelEndpoint
from palestra.models.vision.tiny import TILE, make_tiny_vision
from palestra.pictures.encoding import encode

TRAINED = 1437  # pictures, of 1797
CHANCE = 0.2  # more than a model that always says the most frequent digit can reach on those that are held out
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


@lru_cache(maxsize=4096)
def picture(number: int | None) -> str:
    """Return the data URL of a digit as a PNG of 32 x 32 pixels; None: of a white picture."""
    pixels = np.full((8, 8), 255, np.uint8)
    if number is not None:
        pixels = (digits().images[number] * 255 / 16).astype(np.uint8)
    file = encode(np.kron(pixels, np.ones((4, 4), np.uint8)))
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


async def rollout(task: dict[str, Any], endpoint: ModelEndpoint) -> palestra.RolloutResult:
    """Show the model one digit, and pay for the right answer."""
    client = agent.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    url = picture(None if task["blank"] else task["number"])
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    reply = await client.chat.completions.create(
        model=endpoint.model,
        messages=messages,
        max_tokens=1,
        extra_body={"structured_outputs": {"choice": list("0123456789")}},
    )
    answer = reply.choices[0].message.content or ""
    return palestra.RolloutResult(reward=float(answer == str(task["digit"])), metadata={"answer": answer})


def tasks(blank: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, validation): each picture once, by a split that is always the same."""
    order = np.random.default_rng(20).permutation(len(digits().target)).tolist()
    made = [{"id": str(k), "number": k, "digit": int(digits().target[k]), "blank": blank} for k in order]
    return made[:TRAINED], made[TRAINED:]


def job(model: Path, run: Path, seed: int, steps: int, groups: int) -> JobConfig:
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
                    "optimizer": {"learning_rate": 1e-3},
                }
            },
            "algorithm": {"name": "grpo", "entropy_coefficient": 0.05},
            "rollout": {"groups_per_step": groups, "group_size": 8},
            "engine": {"dtype": "float32", "threads": 1},
            "trainer": {"dtype": "float32", "threads": 1},
            "evaluation": {"every_steps": max(steps // 5, 1)},
            "checkpoint": {"every_steps": steps},
        }
    )


def learned(seed: int, steps: int, groups: int, blank: bool) -> tuple[float, float]:
    """Train one model, and return the share of held-out digits that it reads, before and after."""
    training, held_out = tasks(blank)
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        model, run = Path(folder) / "model", Path(folder) / "run"
        make_tiny_vision(model, width=128, longest=TILE, splits=False)
        result = palestra.train(
            rollout, training, job(model, run, seed, steps, groups), validation_tasks=held_out, resume=False
        )
    scores = [row["validation/reward_mean"] for row in result.metrics if "validation/reward_mean" in row]
    return scores[0], scores[-1]


def main() -> int:
    """Train the asked seeds, and print what each has learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=64, help="pictures of a step, each answered 8 times")
    parser.add_argument("--blank", action="store_true", help="white pictures: the model must stay at chance")
    parser.add_argument("--target", type=float, default=0.8)
    given = parser.parse_args()
    failed = False
    for seed in given.seeds:
        before, after = learned(seed, given.steps, given.groups, given.blank)
        kind = "white pictures" if given.blank else "digits"
        sys.stdout.write(f"{kind}, seed {seed}: held-out {before:.3f} before, {after:.3f} after {given.steps} steps\n")
        failed |= after > CHANCE if given.blank else after < given.target
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
