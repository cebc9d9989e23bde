"""Records of each step: its row in store and file, its event, the curve, and warnings of a run that learns nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from palestra.config import JobConfig
from palestra.learner.health import RECENT, health_of
from palestra.learner.reporting import RunFolder
from palestra.learner.update import AddEvent
from palestra.ledger import RunLog
from palestra.schemas.progress import JobProgress


class StepLog:
    """Writes the rows of a run, oldest first."""

    def __init__(
        self, config: JobConfig, log: RunLog, folder: RunFolder, progress: JobProgress, add_event: AddEvent
    ) -> None:
        """Create the log without rows; `restore` adds those of a resumed run.

        Args:
            config: the job.
            log: the store's log, the source of truth of all rows.
            folder: the files that show the rows.
            progress: the state that `/status` shows.
            add_event: records an event of the job.
        """
        self._config, self._log, self._folder, self._progress = config, log, folder, progress
        self._add_event = add_event
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)  # rows of training steps

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write the file from the rows of the store, as after a restart."""
        self._folder.write_metrics(rows)
        self._recent.extend(row for row in rows if "train/episodes" in row)

    async def write(self, step: int, row: dict[str, float]) -> None:
        """Record the metrics of a step in store, file, status and events; after a validation, draw the curve.

        Args:
            step: number of the step; 0 for the evaluation before the first.
            row: metrics by full name; the number of warnings is added to it.
        """
        await self._warn(row)
        await self._log.put_metrics(step, row)
        self._folder.append_metrics(row)
        self._progress.last_metrics = row
        await self._add_event("step", row)
        if "validation/reward_mean" in row or step == self._config.steps:
            rows = await self._log.metrics()
            await asyncio.to_thread(self._folder.draw_curve, rows, self._config.name)

    async def _warn(self, row: dict[str, float]) -> None:
        """Report each sign of a run that learns nothing, once, when it appears."""
        if "train/episodes" not in row:
            return
        self._recent.append(row)
        config = self._config
        policy = config.players.default if len(config.policies) > 1 else ""
        found = health_of(list(self._recent), config.rollout.groups_per_step, config.steps, policy)
        row["train/warnings"] = float(len(found))
        known = {warning.code for warning in self._progress.warnings}
        self._progress.warnings = found
        for warning in found:
            if warning.code not in known:
                await self._add_event("warning", asdict(warning))
