"""The checkpoints of a run, by the policies that it trains."""

from __future__ import annotations

from pathlib import Path

from palestra.config import JobConfig
from palestra.learner.reporting import checkpoints_of
from palestra.trainer.checkpoint import newest_path


def newest_checkpoints(config: JobConfig, run_dir: Path | None = None) -> dict[str, Path]:
    """Return the newest undamaged checkpoint of each policy that a job trains, by its name; of some there may be none.

    Args:
        config: the job.
        run_dir: its folder; None: the one that it names.
    """
    folder = config.folder if run_dir is None else run_dir
    found = {name: newest_path(checkpoints_of(folder, name, config)) for name in config.trained_policies}
    return {name: path for name, path in found.items() if path is not None}
