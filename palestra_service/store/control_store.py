"""The control store, asynchronous: a method that changes something returns when the change is on disk.

One process has the store at a time (see `backends`), and one thread of it writes, with group commit. A transiently
unavailable database is waited for. SQLite runs with `synchronous=FULL` and PostgreSQL with `synchronous_commit=on`, so
that acknowledged changes survive a loss of power.

The writing thread runs one operation at a time, so each sees the newest state. An operation may run a second time if it
is unknown whether it was committed. So each added row has an id that was generated before, and finding that id means
that the operation was done.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import asdict, fields, replace
from typing import Any, Self, TypedDict, TypeVar, Unpack

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from palestra.database import Database, Notifier, shielded, to_json
from palestra.errors import Conflict, InvalidRequest, NotFound, StoreUnreachable, Superseded, TooManyRequests
from palestra.types.clock import Clock, SystemClock
from palestra.types.states import JobState, check_transition
from palestra_control.jobs import LIVE_STATES, OPEN_STATES, JobFields, JobKind, JobPage, JobRecord, JobRequest
from palestra_control.wire import AuditEntry, JobChange
from palestra_service.store import accounts, decisions, tables
from palestra_service.store.backends import open_backend
from palestra_service.store.changes import add_change, changes_where
from palestra_service.store.stored_text import can_match, check_identifier, check_name, check_request, clean
from palestra_service.store.tables import changes, jobs, resources_text, stored_resources

T = TypeVar("T")
log = logging.getLogger("palestra.control")
AGAIN_SECONDS = 1.0  # between two attempts to confirm the lock
MOST_ROWS = 500
LARGEST_NUMBER = 2**31 - 1  # the largest integer of PostgreSQL's columns for changes and audit lines
MAX_REASON = 4096  # characters
MAX_LOG_TAIL = 65536  # characters

# What a row of `jobs` has as a record and a request have it.
_OTHERWISE = ("user", "config", "resources", "state", "bundle_nodes", "from_newest")
_OF_RECORD = [one.name for one in fields(JobRecord) if one.name not in _OTHERWISE]
_OF_REQUEST = [one.name for one in fields(JobRequest) if one.name not in _OTHERWISE]


class JobFilter(TypedDict, total=False):
    """Which jobs are wanted; None: of any user, name or kind."""

    user: str | None
    name: str | None
    kind: JobKind | None


class ControlStore:
    """Jobs, their changes, and the audit log, in SQLite or PostgreSQL.

    Every method may raise StoreError or StoreUnreachable. One that writes may raise Superseded: another process has
    taken over the store, and this one must change nothing more, in or outside the store.

    A `tenant` of None is any tenant: only the scheduler passes it.

    Attributes:
        changed: notified when a job or the policy changes, or when another process takes over.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.changed = Notifier()
        self._db = Database(open_backend(url), tables.SCHEMA)

    def close(self) -> None:
        """Finish submitted operations, and let another process open the store."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @shielded
    async def write(
        self,
        operation: Callable[[sa.Connection], T],
        then: Callable[[T], None] | None = None,
        tag: str | None = None,
    ) -> T:
        """Run an operation on the writing thread, and a follow-up on the event loop after its commit.

        Both are executed even if the caller is cancelled. `operation`: may run a second time if it is unknown whether
        it had committed. `then`: called with the result when it is on disk.
        """
        try:
            result = await self._db.write(operation, tag)
        except Superseded:
            self.changed.notify()
            raise
        if then is not None:
            then(result)
        return result

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a query on its own connection; it sees every change awaited before."""
        return await self._db.read(operation)

    async def confirm(self) -> None:
        """Check that this process still has the store. Raises Superseded if another process has taken it over."""
        await self.write(lambda _: None)

    async def confirmed(self) -> None:
        """Wait until the database answers, and check that this process still has the store.

        Call it immediately before any change outside the store. Raises Superseded if another process has taken it over.
        """
        while True:
            try:
                return await self.confirm()
            except StoreUnreachable as error:
                log.warning("nothing is started or ended until the database answers: %s", error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _write_job(self, operation: Callable[[Connection], JobRecord]) -> JobRecord:
        return await self.write(operation, lambda _: self.changed.notify(), "job_commit")

    async def submit_job(
        self,
        tenant: str,
        user: str,
        request: JobRequest,
        request_key: str | None = None,
        most_open: int | None = None,
    ) -> JobRecord:
        """Add a QUEUED job. The same `request_key` with the same request returns the same job.

        Args:
            request_key: the client's idempotency key within the tenant; None: none.
            most_open: limit of the user's open jobs, including this one; None: unlimited.

        Raises:
            Conflict: the key was used for another request, or by another user.
            TooManyRequests: the user has `most_open` open jobs, or the tenant as many adapters as its quota allows.
        """
        check_identifier(tenant, "tenant")
        check_identifier(user, "user")
        check_request(request)
        if request_key is not None:
            check_name(request_key, "idempotency_key")
        # A retry may find a newer checkpoint, so a step that was not requested is not a part of the digest.
        asked = asdict(request) | {"user": user} | ({"from_step": None} if request.from_newest else {})
        digest = hashlib.sha256(to_json(asked).encode()).hexdigest()
        job_id, now = f"job-{secrets.token_hex(8)}", self.clock.now()
        same = jobs.c.job_id == job_id
        if request_key is not None:
            same |= (jobs.c.tenant == tenant) & (jobs.c.request_key == request_key)
        row = {name: getattr(request, name) for name in _OF_REQUEST} | {
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
        }

        def submit(connection: Connection) -> JobRecord:
            known = connection.execute(select(jobs).where(same)).first()
            if known is not None:
                if known.request_digest != digest:
                    raise Conflict(
                        f"the idempotency key {request_key!r} was used before for another job; take a new one"
                    )
                return _record_of(known)
            if most_open is not None and _count_open(connection, tenant, user) >= most_open:
                raise TooManyRequests(f"{user} has {most_open} jobs that are not over, and that is the limit", 30.0)
            _check_adapters(connection, tenant, request.adapters)
            connection.execute(jobs.insert(), row)
            job = _read_job(connection, tenant, job_id)
            add_change(connection, job, job_id, None, now)
            return job

        return await self._write_job(submit)

    async def job(self, tenant: str | None, job_id: str) -> JobRecord:
        """Return one job."""
        _check_job_id(job_id)
        return await self.read(lambda c: _read_job(c, tenant, job_id))

    async def jobs(
        self,
        tenant: str,
        *,
        states: Collection[JobState] = (),
        cursor: str | None = None,
        limit: int = 50,
        **equal: Unpack[JobFilter],
    ) -> JobPage:
        """Return a page of a tenant's jobs, newest first. Pages do not shift while jobs are added.

        Raises:
            InvalidRequest: the limit is out of range, or the cursor is not of this list.
        """
        _check_limit(limit)
        named = {"user_name": equal.get("user"), "name": equal.get("name"), "kind": equal.get("kind")}
        given = {column: value for column, value in named.items() if value is not None}
        foreign = InvalidRequest("this cursor is not of this list; begin again without one", "cursor")
        if cursor is not None and not can_match(cursor):
            raise foreign
        if not all(can_match(value) for value in given.values()):
            return JobPage(jobs=(), cursor=None)
        wanted = select(jobs).where(jobs.c.tenant == tenant, *(jobs.c[name] == value for name, value in given.items()))
        if states:
            wanted = wanted.where(jobs.c.state.in_(sorted(states)))

        def page(connection: Connection) -> JobPage:
            query = wanted
            if cursor is not None:
                of_cursor = select(jobs.c.number).where(jobs.c.tenant == tenant, jobs.c.job_id == cursor)
                if (number := connection.execute(of_cursor).scalar()) is None:
                    raise foreign
                query = query.where(jobs.c.number < number)
            rows = connection.execute(query.order_by(jobs.c.number.desc()).limit(limit + 1)).all()
            found = tuple(_record_of(row) for row in rows[:limit])
            return JobPage(jobs=found, cursor=found[-1].job_id if len(rows) > limit else None)

        return await self.read(page)

    async def change_state(
        self,
        job_id: str,
        expected: JobState | Collection[JobState],
        following: JobState,
        reason: str,
        **given: Unpack[JobFields],
    ) -> JobRecord:
        """Change a job's state and record the change in one transaction, if its present state is an expected one.

        STARTING counts a start; a job that is no longer live has no URL.

        Raises:
            NotFound: there is no such job.
            Conflict: the job is in another state, or it would be queued although its cancellation was requested.
            IllegalTransition: the lifecycle does not have this change.
        """
        _check_job_id(job_id)
        change_id, now = secrets.token_hex(16), self.clock.now()
        known = frozenset({expected}) if isinstance(expected, JobState) else frozenset(expected)
        values = _checked(given)

        def change(connection: Connection) -> JobRecord:
            job = _read_job(connection, None, job_id)
            if _is_known(connection, change_id):
                return job
            if job.state not in known:
                wanted = " or ".join(sorted(known))
                raise Conflict(f"job {job_id} is {job.state} and no longer {wanted}; look again before you change it")
            return _moved(connection, job, change_id, following, clean(reason, MAX_REASON), values, now)

        return await self._write_job(change)

    async def request_cancel(self, tenant: str | None, job_id: str, reason: str) -> JobRecord:
        """Cancel a queued job, or mark a live one for the scheduler; no effect on an ended one."""
        _check_job_id(job_id)
        change_id, now, text = secrets.token_hex(16), self.clock.now(), clean(reason, MAX_REASON)

        def cancel(connection: Connection) -> JobRecord:
            job = _read_job(connection, tenant, job_id)
            if job.is_over or job.cancel_requested:
                return job
            connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(cancel_requested=True, reason=text))
            if job.state is JobState.QUEUED:
                return _moved(connection, job, change_id, JobState.CANCELLED, text, {}, now)
            return _read_job(connection, tenant, job_id)

        return await self._write_job(cancel)

    async def queue(self) -> list[JobRecord]:
        """Return all queued jobs of all tenants, in order of submission."""
        return await self._in_states({JobState.QUEUED})

    async def live(self) -> list[JobRecord]:
        """Return all jobs with resources, of all tenants, in order of submission."""
        return await self._in_states(LIVE_STATES)

    async def _in_states(self, states: Collection[JobState]) -> list[JobRecord]:
        wanted = select(jobs).where(jobs.c.state.in_(sorted(states))).order_by(jobs.c.number)
        return await self.read(lambda c: [_record_of(row) for row in c.execute(wanted)])

    async def changes(self, tenant: str | None, job_id: str, after: int = 0) -> list[JobChange]:
        """Return the changes of one job after a number, oldest first."""
        _check_job_id(job_id)

        def found(connection: Connection) -> list[JobChange]:
            _read_job(connection, tenant, job_id)
            return changes_where(connection, changes.c.job_id == job_id, _number(after), None)

        return await self.read(found)

    async def tenant_changes(self, tenant: str, after: int, limit: int) -> list[JobChange]:
        """Return changes of all jobs of a tenant after a number, oldest first."""
        return await self.read(lambda c: changes_where(c, changes.c.tenant == tenant, _number(after), limit))

    async def newest_change(self, tenant: str) -> int:
        """Return the newest change number of a tenant's jobs; 0: there is none."""
        wanted = select(func.coalesce(func.max(changes.c.number), 0)).where(changes.c.tenant == tenant)
        return await self.read(lambda c: int(c.execute(wanted).scalar_one()))

    async def append_audit(self, tenant: str, who: str, key_id: str | None, what: str, target: str) -> None:
        """Append a line to the audit log, without secrets of keys. `key_id` = None: not done with a key."""
        entry_id = secrets.token_hex(16)
        entry = AuditEntry(at=self.clock.now(), who=who, key_id=key_id, what=what, target=target)
        await self.write(lambda c: accounts.append_audit(c, tenant, entry_id, entry))

    async def audit(self, tenant: str, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """Return lines of a tenant's audit log, newest first."""
        _check_limit(limit)
        return await self.read(
            lambda c: accounts.audit_page(c, tenant, None if before is None else _number(before), limit)
        )


def _moved(
    connection: Connection,
    job: JobRecord,
    change_id: str,
    following: JobState,
    reason: str,
    given: dict[str, Any],
    now: float,
) -> JobRecord:
    check_transition(f"job {job.job_id}", job.state, following)
    if following is JobState.QUEUED and job.cancel_requested:
        raise Conflict(f"the cancellation of job {job.job_id} was requested; it can't go back to the queue")
    values = {**given, "state": following.value, "reason": reason, "changed_at": now}
    if following not in LIVE_STATES:
        values["url"] = None
    elif job.cancel_requested:  # the reason for the cancellation says more than that for becoming live
        values["reason"] = job.reason
    if following is JobState.STARTING:
        values["starts"] = jobs.c.starts + 1
    if job.state is JobState.RUNNING:
        values["ran_seconds"] = job.ran_seconds + max(now - job.changed_at, 0.0)
    connection.execute(jobs.update().where(jobs.c.job_id == job.job_id).values(values))
    found = _read_job(connection, None, job.job_id)
    add_change(connection, replace(found, reason=reason), change_id, job.state, now)
    return found


def _record_of(row: Any) -> JobRecord:
    return JobRecord(
        **{name: getattr(row, name) for name in _OF_RECORD},
        user=row.user_name,
        config=orjson.loads(row.config),
        resources=stored_resources(row.resources),
        state=JobState(row.state),
        bundle_nodes=tuple(orjson.loads(row.bundle_nodes or "[]")),
    )


def _read_job(connection: Connection, tenant: str | None, job_id: str) -> JobRecord:
    wanted = select(jobs).where(jobs.c.job_id == job_id)
    row = connection.execute(wanted if tenant is None else wanted.where(jobs.c.tenant == tenant)).first()
    if row is None:
        raise NotFound(f"there is no job {job_id}")
    return _record_of(row)


def _is_known(connection: Connection, change_id: str) -> bool:
    return connection.execute(select(changes.c.number).where(changes.c.change_id == change_id)).first() is not None


def _count_open(connection: Connection, tenant: str, user: str) -> int:
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


def _number(given: int) -> int:
    """Return the nearest number that both databases can compare with."""
    return min(max(given, 0), LARGEST_NUMBER)


def _check_job_id(job_id: str) -> None:
    """Refuse a text that cannot be the id of a job, without asking the database."""
    if not (can_match(job_id) and job_id.isascii() and job_id.isprintable()):
        raise NotFound("there is no such job")


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MOST_ROWS:
        raise InvalidRequest(f"limit is {limit}; it has to be from 1 to {MOST_ROWS}", "limit")
