"""A model made on the spot learns to walk over a frozen lake: many turns, one reward at the end.

    python examples/frozen_lake.py [--steps 24] [--seed 0]

FrozenLake of Gymnasium, 4 x 4, not slippery: 6 right moves in a row, of 4 each, with 4 holes beside the way. The model
has random weights, reads bytes, and is told a letter for the place where it stands. What is decoded is held to the
four moves. The best possible reward is 1; the untrained model comes through about once in a hundred walks.
"""

from __future__ import annotations

import argparse
from typing import Any

import palestra
from palestra import GymnasiumEnvironment, JobConfig, ModelAgent, RolloutSpec


class Lake(GymnasiumEnvironment):
    """Reward 1 at the goal; a hole, or 12 moves without it, ends the walk with 0."""

    max_steps = 12

    def __init__(self) -> None:
        super().__init__("FrozenLake-v1", is_slippery=False)

    def describe(self, seen: Any) -> str:
        """Places are A to P, row by row."""
        return "ABCDEFGHIJKLMNOP"[int(seen)]


def job(seed: int, steps: int) -> JobConfig:
    """What is trained, and how; everything else is a default."""
    return JobConfig.model_validate(
        {
            "name": "frozen-lake",
            "seed": seed,
            "steps": steps,
            "policies": {
                "walker": {
                    "model": "tiny-random",
                    "max_context": 512,
                    "optimizer": {"learning_rate": 5e-3, "schedule": "linear"},
                }
            },
            "rollout": {"groups_per_step": 2, "group_size": 64},  # a walk in a hundred succeeds at first: large groups
            "algorithm": {"credit": "step", "discount": 0.95, "loss_agg_mode": "token-mean", "epochs": 3},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def walks(name: str, count: int) -> list[dict[str, Any]]:
    """Tasks. All are the same map."""
    return [{"id": f"{name}{number}"} for number in range(count)]


def demonstrate(steps: int = 24, seed: int = 0) -> palestra.TrainResult:
    """Train, and score greedily every 5 steps."""
    play = RolloutSpec(environment=Lake, agents={"agent": ModelAgent(choices=("0", "1", "2", "3"), max_tokens=2)})
    return palestra.train(
        play, walks("walk", 2 * steps), job(seed, steps), validation_tasks=walks("greedy", 8), concurrency=128
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns to walk over a frozen lake.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed)
