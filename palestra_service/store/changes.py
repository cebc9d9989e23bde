"""The history of jobs: every change of state, with its time and its reason. Operations on a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, case, func, or_, select

from palestra.types.states import JobState
from palestra_control.wire import JobChange
from palestra_service.store.tables import changes

StateTimes = dict[tuple[str, JobState], tuple[list[int], float]]
"""By tenant and state: how many jobs left it within each limit and not within the one before, and their seconds."""


class NewChange(NamedTuple):
    """A change of a job's state.

    Attributes:
        change_id: unique, so that a commit whose answer was lost can be repeated.
        previous: state before; None: the job was submitted.
    """

    tenant: str
    job_id: str
    change_id: str
    previous: JobState | None
    following: JobState
    reason: str


def add_change(connection: Connection, change: NewChange, now: float) -> None:
    """Record a change of state under the next number of its tenant."""
    last = select(func.coalesce(func.max(changes.c.number), 0)).where(changes.c.tenant == change.tenant)
    connection.execute(
        changes.insert(),
        {
            **change._asdict(),
            "number": connection.execute(last).scalar_one() + 1,
            "at": now,
            "previous": None if change.previous is None else change.previous.value,
            "following": change.following.value,
        },
    )


def is_known(connection: Connection, change_id: str) -> bool:
    """Return whether this change was recorded before."""
    return connection.execute(select(changes.c.number).where(changes.c.change_id == change_id)).first() is not None


def of_job(connection: Connection, job_id: str, number: int) -> list[JobChange]:
    """Return the changes of a job with a number larger than `number`, in order."""
    rows = connection.execute(
        select(changes).where(changes.c.job_id == job_id, changes.c.number > number).order_by(changes.c.number)
    )
    return [_change_of(row) for row in rows]


def of_tenant(connection: Connection, tenant: str, number: int, limit: int) -> list[JobChange]:
    """Return changes of a tenant after a number, in order."""
    wanted = select(changes).where(changes.c.tenant == tenant, changes.c.number > number)
    return [_change_of(row) for row in connection.execute(wanted.order_by(changes.c.number).limit(limit))]


def newest(connection: Connection, tenant: str) -> int:
    """Return the newest change number of a tenant; 0: there is none."""
    wanted = select(func.coalesce(func.max(changes.c.number), 0)).where(changes.c.tenant == tenant)
    return int(connection.execute(wanted).scalar_one())


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


def _change_of(row: Any) -> JobChange:
    return JobChange(**{name: getattr(row, name) for name in JobChange.model_fields})
