"""W&B, offline: folders in `RUN/tracking/wandb`, which `wandb sync` uploads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from palestra.tracking.registry import TrackedRun


class WandbTracker:
    """Writes a run of W&B without network; needs the package `wandb`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb: Any = wandb
        self._of = run
        self._run: Any = None

    def begin(self) -> None:
        """Start the run of W&B and remove its earlier folders, so that an upload has each row once."""
        if self._run is not None:
            self._run.finish()
        run = self._of
        shutil.rmtree(run.folder / "wandb", ignore_errors=True)
        os.environ["WANDB_SILENT"] = "true"
        settings = self._wandb.Settings(x_disable_stats=True, console="off")
        self._run = self._wandb.init(
            mode="offline",
            dir=str(run.folder),
            project="palestra",
            id=run.key,
            name=run.name,
            config=dict(run.settings),
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Add a row of the run's history; see `Tracker`."""
        self._run.log({**values, "_timestamp": at}, step=step)

    def flush(self) -> None:
        """Do nothing: the library's own process writes immediately."""

    def close(self, completed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if completed else 1)
