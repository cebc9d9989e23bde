"""The state that a job gets when its model server has ended."""

from __future__ import annotations

import os
from pathlib import Path

from palestra.scheduler.deadlines import limit_is_over
from palestra.scheduler.launcher import Ended, Ending
from palestra.schemas.jobs import JobRecord
from palestra.schemas.states import JobState

TAIL_BYTES = 4000


def following_state(job: JobRecord, ended: Ended, now: float) -> tuple[JobState, str, int]:
    """Return the next state of a job whose server has ended, the reason, and how many restarts are left.

    Args:
        job: whose server it was.
        ended: how the server ended.
        now: Unix seconds of the ending, at which the job's time limit may be over.
    """
    left = job.restarts_left
    if ended.ending is Ending.COMPLETED:
        return JobState.COMPLETED, "its steps are done", left
    if job.cancel_requested:
        return JobState.CANCELLED, f"{job.reason}; {ended.reason}" if ended.reason else job.reason, left
    if ended.ending is Ending.FAILED:
        return JobState.FAILED, ended.reason, left
    if job.time_left(now) == 0.0:  # a restart would have no time left
        reason = limit_is_over(job)
        return JobState.CANCELLED, f"{reason}; {ended.reason}" if ended.reason else reason, left
    if ended.ending is Ending.LOST and left == 0:
        return JobState.FAILED, f"lost {job.restarts_limit + 1} times, at last: {ended.reason}", left
    if ended.ending is Ending.LOST:
        goes_on = "it goes on from its last checkpoint" if job.kind == "training" else "it is started again"
        return JobState.QUEUED, f"{ended.reason}; {goes_on}", left - 1
    return JobState.QUEUED, ended.reason or "it was stopped, and goes on from its checkpoint", left


def last_lines(path: Path) -> str | None:
    """Return the last lines of a log, at most `TAIL_BYTES`; None: the file can't be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return text if size <= TAIL_BYTES else text.partition("\n")[2]
