"""Weights from which a job starts: a checkpoint of another job of its tenant, of which the job gets its own copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palestra.config import with_model
from palestra.errors import NotFound
from palestra.trainer import checkpoint
from palestra.types.jobs import JobRecord

CHECKPOINTS = "checkpoints"  # in a job's run


def step_meant(run: Path, job_id: str, wanted: int | None) -> int:
    """Return the step of a checkpoint of another job.

    Args:
        run: the other job's run folder.
        job_id: of the other job, for the error.
        wanted: the step; None: the newest.

    Raises:
        NotFound: there is no checkpoint, or none of that step; the message lists those that there are.
    """
    steps = [checkpoint.step_of(path) for path in checkpoint.found(run / CHECKPOINTS)]
    if not steps:
        raise NotFound(f"job {job_id} has no checkpoint to start from; it writes one every checkpoint.every_steps")
    if wanted is None:
        return steps[-1]
    if wanted not in steps:
        there = ", ".join(map(str, steps))
        raise NotFound(f"job {job_id} has no checkpoint of step {wanted}; it has those of {there}")
    return wanted


def with_own_weights(job: JobRecord, folder: Path, source_run: Path) -> dict[str, Any]:
    """Return the configuration of a job with `from_job`, whose model is a folder of the job's own.

    At the first start the folder is filled with hard links to the checkpoint, so that the job does not depend on what
    the other job does with its checkpoints.

    Args:
        job: has `from_job` and `from_step`.
        folder: of the job.
        source_run: run folder of the other job.

    Raises:
        CheckpointError: the checkpoint is gone or damaged.
    """
    assert job.from_step is not None
    own = folder / f"{job.from_job}-step-{job.from_step}"
    if not own.exists():
        checkpoint.link_model(source_run / CHECKPOINTS, job.from_step, own)
    return {**job.config, "policies": with_model(job.config["policies"], str(own))}
