"""Jobs that the scheduler cancels by itself: after their time limit, or without a client if attached.

Deadlines are monotonic, so that setting the clock ends no job. A new scheduler computes remaining times from the
control store's Unix times.
"""

from __future__ import annotations

from palestra.types.clock import Clock
from palestra.types.progress import exact_duration
from palestra.types.states import JobState
from palestra_control.jobs import JobRecord


class Deadlines:
    """The deadlines of all jobs that have not ended."""

    def __init__(self, clock: Clock, absent_seconds: float) -> None:
        self._clock, self._absent_seconds = clock, absent_seconds
        self._seen: dict[str, float] = {}  # last request of an attached job's client, monotonic seconds
        self._limits: dict[str, tuple[float, str]] = {}  # end of a running job's time limit (monotonic), and the reason

    def watch(self, job: JobRecord) -> None:
        """Watch a job: its client if it is attached, and its time limit while it is RUNNING."""
        if job.attached:
            self._seen.setdefault(job.job_id, self._clock.monotonic())
        left = job.time_left(self._clock.now()) if job.state is JobState.RUNNING else None
        if left is not None:
            self._limits.setdefault(job.job_id, (self._clock.monotonic() + left, limit_is_over(job)))

    def seen(self, job_id: str) -> None:
        """Record a request of an attached job's client."""
        if job_id in self._seen:
            self._seen[job_id] = self._clock.monotonic()

    def stop_limit(self, job_id: str) -> None:
        """Stop counting a job's time, because its server has ended."""
        self._limits.pop(job_id, None)

    def remove(self, job_id: str) -> None:
        """Remove an ended job."""
        self._seen.pop(job_id, None)
        self._limits.pop(job_id, None)

    def passed(self) -> dict[str, str]:
        """Return the jobs to cancel now, each with the reason."""
        now = self._clock.monotonic()
        gone = f"its client was gone for {self._absent_seconds:g} s"
        absent = {job_id: gone for job_id, seen in self._seen.items() if now - seen > self._absent_seconds}
        return absent | {job_id: reason for job_id, (end, reason) in self._limits.items() if now >= end}


def limit_is_over(job: JobRecord) -> str:
    """Return the reason for a job that has exceeded its time limit, with the user's next step."""
    assert job.time_limit_seconds is not None
    over = f"its time limit of {exact_duration(job.time_limit_seconds)} is over"
    if job.kind == "inference":
        return f"{over}; to serve the model again, submit the job again"
    return f"{over}; to train further from its newest checkpoint, submit with --from-job {job.job_id} --kind training"
