"""`JobPlaces`: where the other processes of a job run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palestra.process.child import ProcessStarter
from palestra.runtime.runner_fleet import RunnerStarter
from palestra.runtime.runner_process import start_runner


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlaces:
    """Starts the processes of a job.

    Attributes:
        runner: starts a runner of `environment.runners`.
        engine: starts an inference worker in its own bundle; None: workers share this machine with the job.
        trainer: starts a rank in its own bundle; None: ranks share this machine with the job.
        rank_memory_gib: memory of a rank's bundle; None: unknown or no bundle.
        folder: shared folder for weights that travel between machines; None: there is only this machine.
    """

    runner: RunnerStarter = start_runner
    engine: ProcessStarter | None = None
    trainer: ProcessStarter | None = None
    rank_memory_gib: float | None = None
    folder: Path | None = None


HERE = JobPlaces()
"""All processes are on this machine."""
