"""The history of jobs: every change of state, with its time and its reason. Operations on a connection."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from palestra.types.states import JobState
from palestra_control.jobs import JobRecord
from palestra_control.wire import JobChange
from palestra_service.store.tables import changes

StateTimes = dict[tuple[str, JobState], tuple[list[int], float]]
"""By tenant and state: how many jobs left it within each limit and not within the one before, and their seconds."""


def add_change(connection: Connection, job: JobRecord, change_id: str, previous: JobState | None, now: float) -> None:
    """Record that a job has come into its state, under the next number of its tenant.

    Args:
        change_id: unique, so that a commit whose answer was lost can be repeated.
        previous: state before; None: the job was submitted.
    """
    last = select(func.coalesce(func.max(changes.c.number), 0)).where(changes.c.tenant == job.tenant)
    connection.execute(
        changes.insert(),
        {
            "tenant": job.tenant,
            "job_id": job.job_id,
            "change_id": change_id,
            "number": connection.execute(last).scalar_one() + 1,
            "at": now,
            "previous": None if previous is None else previous.value,
            "following": job.state.value,
            "reason": job.reason,
        },
    )


def changes_where(
    connection: Connection, condition: ColumnElement[bool], after: int, limit: int | None
) -> list[JobChange]:
    """Return changes with a number above `after`, in order."""
    wanted = select(changes).where(condition, changes.c.number > after).order_by(changes.c.number).limit(limit)
    rows = connection.execute(wanted)
    return [JobChange(**{name: getattr(row, name) for name in JobChange.model_fields}) for row in rows]


def state_times(connection: Connection, tenant: str | None, limits: Sequence[float]) -> StateTimes:
    """Return histograms of jobs' times from queued to started to running; one count more than `limits` (seconds)."""
    began = func.lag(changes.c.at).over(partition_by=changes.c.job_id, order_by=changes.c.number)
    columns = (changes.c.tenant, changes.c.previous, changes.c.following)
    moves = select(*columns, (changes.c.at - began).label("seconds"))
    moved = (moves if tenant is None else moves.where(changes.c.tenant == tenant)).subquery()
    slot = case(*((moved.c.seconds <= limit, n) for n, limit in enumerate(limits)), else_=len(limits)).label("slot")
    wanted = ((JobState.QUEUED, JobState.STARTING), (JobState.STARTING, JobState.RUNNING))
    rows = connection.execute(
        select(moved.c.tenant, moved.c.previous, slot, func.count(), func.sum(moved.c.seconds))
        .where(or_(*(and_(moved.c.previous == a.value, moved.c.following == b.value) for a, b in wanted)))
        .group_by(moved.c.tenant, moved.c.previous, "slot")
    )
    found: StateTimes = {}
    for name, state, place, number, seconds in rows:
        numbers, total = found.get((name, JobState(state)), ([0] * (len(limits) + 1), 0.0))
        numbers[place] += number
        found[name, JobState(state)] = (numbers, total + seconds)
    return found
