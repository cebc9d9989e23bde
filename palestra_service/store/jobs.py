"""Jobs, as operations on a connection. The writing thread runs one at a time, so each sees the newest state.

An operation may run a second time if it is unknown whether it was committed. So each added row has an id that was
generated before, and finding that id means that the operation was done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple, TypedDict

import orjson
from sqlalchemy import Connection, func, select

from palestra.database import to_json
from palestra.errors import Conflict, InvalidRequest, NotFound, TooManyRequests
from palestra.types.states import JobState, check_transition
from palestra_control.jobs import (
    LIVE_STATES,
    OPEN_STATES,
    JobFields,
    JobKind,
    JobPage,
    JobRecord,
    JobRequest,
)
from palestra_control.wire import JobChange
from palestra_service.store import changes, decisions
from palestra_service.store.stored_text import clean
from palestra_service.store.tables import jobs, resources_text, stored_resources

MAX_REASON = 4096  # characters
MAX_LOG_TAIL = 65536  # characters


# What a row of `jobs` has as a record and a request have it.
_OTHERWISE = ("user", "config", "resources", "state", "bundle_nodes", "from_newest")
_OF_RECORD = [one.name for one in fields(JobRecord) if one.name not in _OTHERWISE]
_OF_REQUEST = [one.name for one in fields(JobRequest) if one.name not in _OTHERWISE]


def record_of(row: Any) -> JobRecord:
    """Return the job of a row of `jobs`."""
    return JobRecord(
        **{name: getattr(row, name) for name in _OF_RECORD},
        user=row.user_name,
        config=orjson.loads(row.config),
        resources=stored_resources(row.resources),
        state=JobState(row.state),
        bundle_nodes=tuple(orjson.loads(row.bundle_nodes or "[]")),
    )


class JobFilter(TypedDict, total=False):
    """Which jobs are wanted; None: of any user, name or kind."""

    user: str | None
    name: str | None
    kind: JobKind | None


class Submission(NamedTuple):
    """A job that a user submits.

    Attributes:
        request_key: the client's idempotency key, if any.
        most_open: how many jobs of the user may be open; None: any number.
    """

    tenant: str
    user: str
    request: JobRequest
    job_id: str
    request_key: str | None
    most_open: int | None


def submit(connection: Connection, submission: Submission, now: float) -> JobRecord:
    """Add a job in QUEUED, or return the one that was submitted with the same key.

    Raises:
        Conflict: the key was used for another request.
        TooManyRequests: the user has `most_open` open jobs, or the tenant as many adapters as its quota allows.
    """
    tenant, user, request, job_id, request_key, most_open = submission
    # A retry may find a newer checkpoint, so a step that was not requested is not a part of the digest.
    asked = asdict(request) | {"user": user} | ({"from_step": None} if request.from_newest else {})
    digest = hashlib.sha256(to_json(asked).encode()).hexdigest()
    same = jobs.c.job_id == job_id
    if request_key is not None:
        same |= (jobs.c.tenant == tenant) & (jobs.c.request_key == request_key)
    known = connection.execute(select(jobs).where(same)).first()
    if known is not None:
        if known.request_digest != digest:
            raise Conflict(f"the idempotency key {request_key!r} was used before for another job; take a new one")
        return record_of(known)
    if most_open is not None and _count_open(connection, tenant, user) >= most_open:
        raise TooManyRequests(f"{user} has {most_open} jobs that are not over, and that is the limit", 30.0)
    _check_adapters(connection, tenant, request.adapters)
    connection.execute(
        jobs.insert(),
        {name: getattr(request, name) for name in _OF_REQUEST}
        | {
            "job_id": job_id,
            "tenant": tenant,
            "user_name": user,
            "config": to_json(request.config),
            "resources": resources_text(request.resources),
            "state": JobState.QUEUED.value,
            "reason": "submitted",
            "created_at": now,
            "changed_at": now,
            "starts": 0,
            "restarts_left": request.restarts_limit,
            "cancel_requested": False,
            "request_key": request_key,
            "request_digest": digest,
        },
    )
    changes.add_change(connection, changes.NewChange(tenant, job_id, job_id, None, JobState.QUEUED, "submitted"), now)
    return read_job(connection, tenant, job_id)


def read_job(connection: Connection, tenant: str | None, job_id: str) -> JobRecord:
    """Return one job."""
    wanted = select(jobs).where(jobs.c.job_id == job_id)
    row = connection.execute(wanted if tenant is None else wanted.where(jobs.c.tenant == tenant)).first()
    if row is None:
        raise NotFound(f"there is no job {job_id}")
    return record_of(row)


def page(
    connection: Connection,
    tenant: str,
    equal: Mapping[str, str],
    states: Collection[str],
    before: str | None,
    limit: int,
) -> JobPage:
    """Return a page of a tenant's jobs, newest first."""
    wanted = select(jobs).where(jobs.c.tenant == tenant)
    for column, value in equal.items():
        wanted = wanted.where(jobs.c[column] == value)
    if states:
        wanted = wanted.where(jobs.c.state.in_(sorted(states)))
    if before is not None:
        number = connection.execute(
            select(jobs.c.number).where(jobs.c.tenant == tenant, jobs.c.job_id == before)
        ).scalar()
        if number is None:
            raise InvalidRequest("this cursor is not of this list; begin again without one", "cursor")
        wanted = wanted.where(jobs.c.number < number)
    rows = connection.execute(wanted.order_by(jobs.c.number.desc()).limit(limit + 1)).all()
    found = tuple(record_of(row) for row in rows[:limit])
    return JobPage(jobs=found, cursor=found[-1].job_id if len(rows) > limit else None)


def in_states(connection: Connection, states: Collection[JobState]) -> list[JobRecord]:
    """Return every job in one of these states, of all tenants, in order of submission."""
    rows = connection.execute(select(jobs).where(jobs.c.state.in_(sorted(states))).order_by(jobs.c.number))
    return [record_of(row) for row in rows]


class Move(NamedTuple):
    """A change of state that is asked for.

    Attributes:
        change_id: of this change; if it is known, the change was made before.
        fields: what changes with the state.
    """

    job_id: str
    change_id: str
    expected: Collection[JobState]
    following: JobState
    reason: str
    fields: JobFields


def change_state(connection: Connection, move: Move, now: float) -> JobRecord:
    """Change the state of a job, if its present state is an expected one.

    Raises:
        NotFound: there is no such job.
        Conflict: the job is in another state, or it would be queued although its cancellation was requested.
        IllegalTransition: the lifecycle does not have this move.
    """
    job_id, change_id, expected, following, reason, changed = move
    job = read_job(connection, None, job_id)
    if changes.is_known(connection, change_id):
        return job
    if job.state not in expected:
        wanted = " or ".join(sorted(expected))
        raise Conflict(f"job {job_id} is {job.state} and no longer {wanted}; look again before you change it")
    check_transition(f"job {job_id}", job.state, following)
    if following is JobState.QUEUED and job.cancel_requested:
        raise Conflict(f"the cancellation of job {job_id} was requested; it can't go back to the queue")
    values: dict[str, Any] = {**_checked(changed)}
    if following not in LIVE_STATES:
        values["url"] = None
    if following is JobState.STARTING:
        values["starts"] = jobs.c.starts + 1
    if job.state is JobState.RUNNING:
        values["ran_seconds"] = job.ran_seconds + max(now - job.changed_at, 0.0)
    reason = clean(reason, MAX_REASON)
    values |= {"state": following.value, "reason": reason, "changed_at": now}
    # The reason for the cancellation says more than that for becoming live.
    if job.cancel_requested and following in LIVE_STATES:
        values["reason"] = job.reason
    connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(values))
    changes.add_change(connection, changes.NewChange(job.tenant, job_id, change_id, job.state, following, reason), now)
    return read_job(connection, None, job_id)


def request_cancel(
    connection: Connection, tenant: str | None, job_id: str, change_id: str, reason: str, now: float
) -> JobRecord:
    """Cancel a queued job, or mark a live one for the scheduler; no effect on an ended one."""
    job = read_job(connection, tenant, job_id)
    if job.is_over or job.cancel_requested:
        return job
    reason = clean(reason, MAX_REASON)
    connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(cancel_requested=True, reason=reason))
    if job.state is JobState.QUEUED:
        move = Move(job_id, change_id, {JobState.QUEUED}, JobState.CANCELLED, reason, {})
        return change_state(connection, move, now)
    return read_job(connection, tenant, job_id)


def changes_of(connection: Connection, tenant: str | None, job_id: str, after: int) -> list[JobChange]:
    """Return the changes of one job after a number, oldest first."""
    read_job(connection, tenant, job_id)
    return changes.of_job(connection, job_id, after)


def _count_open(connection: Connection, tenant: str, user: str) -> int:
    """Return how many jobs of a user have not ended."""
    return connection.execute(
        select(func.count()).where(
            jobs.c.tenant == tenant, jobs.c.user_name == user, jobs.c.state.in_(sorted(OPEN_STATES))
        )
    ).scalar_one()


def _check_adapters(connection: Connection, tenant: str, adapters: int) -> None:
    """Refuse a job with more adapters on shared bases than its tenant's quota leaves."""
    quota = decisions.quota_of(connection, tenant) if adapters else None
    if quota is None or quota.adapters is None:
        return
    of_tenant = (jobs.c.tenant == tenant) & jobs.c.state.in_(sorted(OPEN_STATES))
    held = connection.execute(select(func.coalesce(func.sum(jobs.c.adapters), 0)).where(of_tenant)).scalar_one()
    if held + adapters > quota.adapters:
        raise TooManyRequests(
            f"the jobs of tenant {tenant} that are not over have {held} adapters on base servers, this one needs "
            f"{adapters}, and its quota is {quota.adapters}; a job that ends or is cancelled frees its own",
            30.0,
        )


def _checked(changed: JobFields) -> dict[str, Any]:
    """Return fields that may be set, with keys in texts hidden."""
    unknown = changed.keys() - JobFields.__annotations__.keys()
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))} can't be set")
    given: dict[str, Any] = {**changed}
    if "bundle_nodes" in given:
        given["bundle_nodes"] = to_json(given["bundle_nodes"])
    return {name: clean(value, MAX_LOG_TAIL) if isinstance(value, str) else value for name, value in given.items()}
