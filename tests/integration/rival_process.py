"""A job that plays and trains the seat `second` of another job: `rival_process.py URL FOLDER [--resume]`."""

from __future__ import annotations

import sys
from pathlib import Path

from servers import TINY

import palestra

if __name__ == "__main__":
    rounds = {"rollout": {"group_size": 3, "groups_per_step": 2}, "evaluation": {"every_steps": 0}}
    settings = (
        TINY | rounds | {"name": "rival", "steps": 3, "run_dir": Path(sys.argv[2]), "checkpoint": {"every_steps": 1}}
    )
    palestra.train(
        environment=palestra.SeatEnvironment("second", sys.argv[1]),
        tasks=[{}],
        config=palestra.JobConfig.model_validate(settings),
        resume="--resume" in sys.argv,
        quiet=True,
    )
