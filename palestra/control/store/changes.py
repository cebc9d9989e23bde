"""The history of jobs: every change of state, with its time and its reason. Operations on a connection."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select

from palestra.control.store.tables import changes
from palestra.types.jobs import JobChange
from palestra.types.states import JobState


def add(
    connection: Connection,
    tenant: str,
    job_id: str,
    change_id: str,
    previous: JobState | None,
    following: JobState,
    reason: str,
    now: float,
) -> None:
    """Record a change of state under the next number of its tenant.

    Args:
        connection: in a transaction of the writing thread.
        tenant: whose job it is.
        job_id: of the job.
        change_id: unique, so that a commit whose answer was lost can be repeated.
        previous: state before; None: the job was submitted.
        following: state after.
        reason: why, for people.
        now: Unix seconds.
    """
    last = select(func.coalesce(func.max(changes.c.number), 0)).where(changes.c.tenant == tenant)
    connection.execute(
        changes.insert(),
        {
            "tenant": tenant,
            "number": connection.execute(last).scalar_one() + 1,
            "change_id": change_id,
            "job_id": job_id,
            "at": now,
            "previous": None if previous is None else previous.value,
            "following": following.value,
            "reason": reason,
        },
    )


def is_known(connection: Connection, change_id: str) -> bool:
    """Return whether this change was recorded before."""
    return connection.execute(select(changes.c.number).where(changes.c.change_id == change_id)).first() is not None


def of_job(connection: Connection, job_id: str, number: int) -> list[JobChange]:
    """Return the changes of a job in order.

    Args:
        connection: to the store.
        job_id: of the job.
        number: only changes with a larger number are returned.
    """
    rows = connection.execute(
        select(changes).where(changes.c.job_id == job_id, changes.c.number > number).order_by(changes.c.number)
    )
    return [_change_of(row) for row in rows]


def _change_of(row: Any) -> JobChange:
    """Return the change that a row of `changes` holds."""
    return JobChange(
        job_id=row.job_id,
        number=row.number,
        at=row.at,
        previous=None if row.previous is None else JobState(row.previous),
        following=JobState(row.following),
        reason=row.reason,
    )
