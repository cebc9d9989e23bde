"""An environment of Gymnasium: a model of random weights learns to walk over a frozen lake.

    python recipes/frozen_lake.py [--steps 24] [--seed 0] [--model tiny-random]

FrozenLake, 4 x 4, not slippery: 6 right moves in a row, of 4 each, with 4 holes beside the way, and one reward at the
end. The model reads a letter for the place where it stands; what it decodes is held to the four moves. The best
possible reward is 1; the untrained model arrives about once in a hundred walks. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import palestra
from palestra import JobConfig, ModelAgent, RolloutSpec
from palestra_worlds import GymnasiumEnvironment

MOVES = ModelAgent(choices=("0", "1", "2", "3"), max_tokens=2)  # YOURS 3: the moves


class Lake(GymnasiumEnvironment):  # YOURS 1: any environment of Gymnasium
    """Gives 1 at the goal; a hole, or 12 moves without the goal, ends the walk with 0."""

    def __init__(self, size: int = 4) -> None:
        super().__init__("FrozenLake-v1", map_name=f"{size}x{size}", is_slippery=False)
        self.size, self._moves = size, 0

    def reset(self, task: Any) -> tuple[str, dict[str, Any]]:
        """Begin at the place that the task names, or at the map's own."""
        seen, info = super().reset(task)
        self._moves = 0
        if "start" in task:
            self._world.unwrapped.s = task["start"]
            seen = self.describe(task["start"])
        return seen, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move. The limit of moves belongs to the task: a walk that needs more has ended, and is not just cut off."""
        seen, reward, terminated, truncated, info = super().step(action)
        self._moves += 1
        return seen, reward, terminated or self._moves == 3 * self.size, truncated, info

    def describe(self, seen: Any) -> str:
        """Return what the agent sees: places are A to P, row by row, on 4 x 4, and A1 to H8 on 8 x 8."""
        row, column = divmod(int(seen), self.size)
        return "ABCDEFGHIJKLMNOP"[int(seen)] if self.size == 4 else f"{'ABCDEFGH'[row]}{column + 1}"  # YOURS 2


def job(seed: int, steps: int, model: str = "tiny-random") -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "frozen-lake",
            "seed": seed,
            "steps": steps,
            "policies": {"walker": {"model": model, "max_context": 512, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 2, "group_size": 64},  # a walk in a hundred succeeds at first: large groups
            "algorithm": {"credit": "step", "discount": 0.95, "loss_agg_mode": "token-mean", "epochs": 3},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def walks(name: str, count: int) -> list[dict[str, Any]]:
    """Return tasks, which are all the same map."""
    return [{"id": f"{name}{number}"} for number in range(count)]


def scenario(size: int = 4) -> dict[str, Any]:
    """Return what `palestra compare` trains: walks from every place that is no hole, with the same places held out.

    Args:
        size: 4 or 8, the size of the map.
    """
    world = Lake(size)._world.unwrapped
    starts = [place for place, field in enumerate(world.desc.flatten().tolist()) if field in (b"S", b"F")]
    tasks = {split: [{"id": f"{split}-{start}", "start": start} for start in starts] for split in ("walk", "greedy")}
    return {
        "rollout": RolloutSpec(environment=lambda: Lake(size), agents={"agent": MOVES}),
        "tasks": tasks["walk"],
        "validation_tasks": tasks["greedy"],
        "concurrency": 128,
        "config": job(0, 1),
    }


def demonstrate(steps: int = 24, seed: int = 0, model: str = "tiny-random") -> palestra.TrainResult:
    """Train, and score greedily every 5 steps."""
    play = RolloutSpec(environment=Lake, agents={"agent": MOVES})
    config, held_out = job(seed, steps, model), walks("greedy", 8)
    return palestra.train(play, walks("walk", 2 * steps), config, validation_tasks=held_out, concurrency=128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns to walk over a frozen lake.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
