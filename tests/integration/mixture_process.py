"""A job with three environments and the fake engine, which a test kills: arguments FOLDER STEPS new|resume."""

from __future__ import annotations

import sys
from pathlib import Path

import palestra
from palestra import JobConfig
from palestra.engine.fake import FakeEngineConfig


def settings(folder: Path, steps: int, delay: float) -> JobConfig:
    """Dynamic sampling replaces most groups, because a random reply is seldom right."""
    environments = [
        {"id": "sums", "name": "arithmetic", "weight": 3, "train_tasks": 30, "validation_tasks": 2},
        {"id": "letters", "name": "arithmetic", "weight": 2, "train_tasks": 9, "validation_tasks": 2},
        {"id": "products", "name": "calculator", "weight": 1, "train_tasks": 20, "validation_tasks": 2},
    ]
    return JobConfig.model_validate(
        {
            "run_dir": folder,
            "steps": steps,
            "deterministic": True,
            "environments": environments,
            "curriculum": {},
            "rollout": {"group_size": 2, "groups_per_step": 4},
            "algorithm": {"name": "grpo", "dynamic_sampling": 1},
            "checkpoint": {"every_steps": 2},
            "evaluation": {"every_steps": 3},
            "engine": FakeEngineConfig(delay_seconds=delay),
        }
    )


if __name__ == "__main__":
    palestra.train(
        config=settings(Path(sys.argv[1]), int(sys.argv[2]), 0.02), resume=sys.argv[3] == "resume", quiet=True
    )
