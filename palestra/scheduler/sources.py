"""Weights that a job starts from: a checkpoint of another job of its tenant, of which it gets a copy of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palestra.errors import NotFound
from palestra.schemas.jobs import JobRecord
from palestra.trainer import checkpoint

CHECKPOINTS = "checkpoints"  # in a job's run


def step_meant(run: Path, job_id: str, wanted: int | None) -> int:
    """The step of a checkpoint in the run of `job_id`: `wanted`, or the newest.

    Raises:
        NotFound: there is none, or not that one; the message says which there are.
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
    """The configuration of a job with `from_job`, in which the model is a folder of its own in `folder`.

    At the first start that is made of hard links, so what the other job does with its checkpoints changes nothing.

    Raises:
        CheckpointError: the checkpoint is gone or damaged.
    """
    assert job.from_step is not None
    own = folder / f"{job.from_job}-step-{job.from_step}"
    if not own.exists():
        checkpoint.link_model(source_run / CHECKPOINTS, job.from_step, own)
    policies = {name: {**policy, "model": str(own)} for name, policy in job.config["policies"].items()}
    return {**job.config, "policies": policies}
