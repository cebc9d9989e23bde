"""An environment of your own: a model of random weights learns the code of a lock, digit by digit.

    python recipes/own_environment.py [--steps 20] [--seed 0] [--model tiny-random]

The lock has three digits from 1 to 4 and shows how many it has taken; a wrong one ends the episode, and only the open
lock is worth 1. Untrained, one attempt in 64 opens it. `check_environment` finds the usual mistakes before an agent
does. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import palestra
from palestra import Environment, JobConfig, ModelAgent, RolloutSpec, check_environment


class Lock(Environment):
    """Gymnasium's form: `reset` and `step` return what the agent sees, which is text."""

    max_steps = 3  # then the episode is truncated
    blocking = False  # `step` is quick; otherwise it runs in a thread
    reusable = True  # `reset` may be called again

    def reset(self, task: Any) -> tuple[str, dict[str, Any]]:
        """Close the lock; return the first observation, and information for people."""
        self.code, self.taken = task["code"], 0
        return "0", {}  # YOURS 1: what the agent sees first

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Try a digit; return observation, reward, terminated, truncated and information for people."""
        right = action == self.code[self.taken]  # a model of words may say anything: it must not raise
        self.taken += right
        opened = self.taken == 3
        return str(self.taken), float(opened), opened or not right, False, {"right": right}  # YOURS 2: the reward


def attempts(name: str, count: int) -> list[dict[str, Any]]:
    """Return tasks, which are all the same lock."""
    return [{"id": f"{name}{number}", "code": "314"} for number in range(count)]  # YOURS 3: the tasks


def job(seed: int, steps: int, model: str) -> JobConfig:
    """Return what is trained, and how; everything else is a default."""
    optimizer = {"learning_rate": 5e-3, "schedule": "linear"}
    return JobConfig.model_validate(
        {
            "name": "lock",
            "seed": seed,
            "steps": steps,
            "policies": {"burglar": {"model": model, "max_context": 256, "optimizer": optimizer}},
            "rollout": {"groups_per_step": 2, "group_size": 64},
            "algorithm": {"credit": "step", "discount": 0.95, "loss_agg_mode": "token-mean", "epochs": 3},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 128},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1},
        }
    )


def demonstrate(steps: int = 20, seed: int = 0, model: str = "tiny-random") -> palestra.TrainResult:
    """Check the environment, then train; the lock is tried greedily every 5 steps."""
    check_environment(Lock, attempts("checked", 3))
    play = RolloutSpec(environment=Lock, agents={"agent": ModelAgent(choices=("1", "2", "3", "4"), max_tokens=2)})
    config, held_out = job(seed, steps, model), attempts("greedy", 4)
    return palestra.train(play, attempts("train", 2 * steps), config, validation_tasks=held_out, concurrency=128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tiny model learns the code of a lock.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-random")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.seed, arguments.model)
