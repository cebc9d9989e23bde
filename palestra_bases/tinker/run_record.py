"""The run folder of a model trained through the Tinker API: like another job's, without episodes.

`palestra top`, `palestra export` and the page read it. The journal is authoritative.
"""

from __future__ import annotations

import time
from pathlib import Path

from palestra.config import AdapterConfig, JobConfig, RolloutConfig
from palestra.errors import CheckpointError
from palestra.learner import RunFolder
from palestra.learner.reporting import CHECKPOINTS
from palestra.store.run_store import RunStore, open_run_store
from palestra.trainer.base import OptimReport


class RunRecord:
    """Writes a row of metrics for each optimizer step."""

    def __init__(self, folder: Path, model_id: str, base: str, adapter: AdapterConfig) -> None:
        """Write the description of the run."""
        self._folder = RunFolder(folder)
        policy = {"model": base, "adapter": adapter.model_dump()}
        self._folder.write_config(
            JobConfig.model_validate({"name": folder.name, "run_dir": folder, "policies": {"policy": policy}})
        )
        self._store: RunStore = open_run_store(self._folder.store, RolloutConfig(), synchronous="NORMAL")
        self._model_id = model_id
        self._loss = self._seconds = 0.0
        self._rows = self._tokens = 0

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints for restoring and exporting the model."""
        return self._folder.path / CHECKPOINTS

    async def restore(self, step: int) -> None:
        """Drop the rows after a step, from which training continues."""
        await self._store.log.restore_metrics(step)
        rows = await self._store.log.metrics()
        if any("step" not in row for row in rows):
            raise CheckpointError(f"{self._folder.store} has rows of another kind of run")
        self._folder.write_metrics(rows)
        self._loss = self._seconds = 0.0
        self._rows = self._tokens = 0

    def add(self, loss: float, rows: int, tokens: int, seconds: float) -> None:
        """Count one `forward_backward`, whose `loss` is summed over its tokens."""
        self._loss, self._seconds = self._loss + loss, self._seconds + seconds
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens

    async def step(self, step: int, report: OptimReport, seconds: float, again: bool) -> None:
        """Write the row of one optimizer step. `again`: whether the step is repeated to restore the model."""
        took = self._seconds + seconds
        row = {
            "step": float(step),
            "version": float(step),
            "train/loss": self._loss,
            "train/rows": float(self._rows),
            "train/trained_tokens": float(self._tokens),
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/updates_skipped": float(not report.applied),
            "time/train_seconds": took,
            "time/step_seconds": took,
            "wall_seconds": time.time() - await self._began(),
        }
        await self._store.log.put_metrics(step, row)
        self._folder.append_metrics(row)
        if not again:
            await self._store.log.add_event("step", row)
        self._loss = self._seconds = 0.0
        self._rows = self._tokens = 0

    async def _began(self) -> float:
        known = await self._store.log.fact("began")
        if known is None:
            known = str(time.time())
            await self._store.log.set_fact("began", known)
            await self._store.log.add_event("tinker_model", {"model_id": self._model_id})
        return float(known)

    def close(self) -> None:
        """Close the run's store, after pending writes."""
        self._store.close()
