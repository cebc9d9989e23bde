"""The checkpoints of a run, by the policies that it trains."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from palestra.config import JobConfig
from palestra.learner.reporting import checkpoints_of
from palestra.trainer.checkpoint import found, newest_path, step_of


class RunCheckpoint(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        folder: may be damaged, or removed meanwhile.
    """

    policy: str
    step: int
    folder: Path


def all_checkpoints(config: JobConfig, run_dir: Path) -> dict[str, RunCheckpoint]:
    """Return the checkpoints of a run by names such as `policy@step-20`, each policy's newest first."""
    return {
        f"{policy}@step-{step_of(path)}": RunCheckpoint(policy, step_of(path), path)
        for policy in config.trained_policies
        for path in reversed(found(checkpoints_of(run_dir, policy, config)))
    }


def newest_checkpoints(config: JobConfig, run_dir: Path | None = None) -> dict[str, Path]:
    """Return the newest undamaged checkpoint of each trained policy, by name; policies without one are left out.

    Args:
        run_dir: None: the job's.
    """
    folder = config.folder if run_dir is None else run_dir
    found = {name: newest_path(checkpoints_of(folder, name, config)) for name in config.trained_policies}
    return {name: path for name, path in found.items() if path is not None}
