"""The control store, asynchronous: a method that changes something returns when the change is on disk.

One process has the store at a time (see `backends`), and one thread of it writes, with group commit. A transiently
unavailable database is waited for. SQLite runs with `synchronous=FULL` and PostgreSQL with `synchronous_commit=on`, so
that acknowledged changes survive a loss of power.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Self, TypeVar, Unpack

import sqlalchemy as sa

from palestra.database import Database, Notifier, shielded
from palestra.errors import InvalidRequest, NotFound, StoreUnreachable, Superseded
from palestra.types.clock import Clock, SystemClock
from palestra.types.states import JobState
from palestra_control.jobs import LIVE_STATES, JobFields, JobPage, JobRecord, JobRequest
from palestra_control.wire import AuditEntry, JobChange
from palestra_service.store import accounts, changes, jobs, tables
from palestra_service.store.backends import open_backend
from palestra_service.store.stored_text import can_match, check_identifier, check_name, check_request

T = TypeVar("T")
log = logging.getLogger("palestra.control")
AGAIN_SECONDS = 1.0  # between two attempts to confirm the lock
MOST_ROWS = 500
LARGEST_NUMBER = 2**31 - 1  # the largest integer of PostgreSQL's columns for changes and audit lines


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
            TooManyRequests: the user has `most_open` open jobs.
        """
        check_identifier(tenant, "tenant")
        check_identifier(user, "user")
        check_request(request)
        if request_key is not None:
            check_name(request_key, "idempotency_key")
        now = self.clock.now()
        submission = jobs.Submission(tenant, user, request, f"job-{secrets.token_hex(8)}", request_key, most_open)
        return await self.write(
            lambda c: jobs.submit(c, submission, now),
            self._notify,
            "job_commit",
        )

    async def job(self, tenant: str | None, job_id: str) -> JobRecord:
        """Return one job."""
        _check_job_id(job_id)
        return await self.read(lambda c: jobs.read_job(c, tenant, job_id))

    async def jobs(
        self,
        tenant: str,
        *,
        states: Collection[JobState] = (),
        cursor: str | None = None,
        limit: int = 50,
        **equal: Unpack[jobs.JobFilter],
    ) -> JobPage:
        """Return a page of a tenant's jobs, newest first. Pages do not shift while jobs are added.

        Raises:
            InvalidRequest: the limit is out of range, or the cursor is not of this list.
        """
        _check_limit(limit)
        named = {"user_name": equal.get("user"), "name": equal.get("name"), "kind": equal.get("kind")}
        wanted = {column: value for column, value in named.items() if value is not None}
        if cursor is not None and not can_match(cursor):
            raise InvalidRequest("this cursor is not of this list; begin again without one", "cursor")
        if not all(can_match(value) for value in wanted.values()):
            return JobPage(jobs=(), cursor=None)
        return await self.read(lambda c: jobs.page(c, tenant, wanted, states, cursor, limit))

    async def change_state(
        self,
        job_id: str,
        expected: JobState | Collection[JobState],
        following: JobState,
        reason: str,
        **fields: Unpack[JobFields],
    ) -> JobRecord:
        """Change a job's state and record the change in one transaction, if its present state is an expected one.

        STARTING counts a start; a job that is no longer live has no URL. Raises Conflict if the job is in another
        state, or it would be queued although its cancellation was requested.
        """
        _check_job_id(job_id)
        now = self.clock.now()
        move = jobs.Move(job_id, secrets.token_hex(16), _states(expected), following, reason, fields)
        return await self.write(
            lambda c: jobs.change_state(c, move, now),
            self._notify,
            "job_commit",
        )

    async def request_cancel(self, tenant: str | None, job_id: str, reason: str) -> JobRecord:
        """Cancel a queued job, or mark a live one for the scheduler; no effect on an ended one."""
        _check_job_id(job_id)
        change_id, now = secrets.token_hex(16), self.clock.now()
        return await self.write(
            lambda c: jobs.request_cancel(c, tenant, job_id, change_id, reason, now), self._notify, "job_commit"
        )

    async def queue(self) -> list[JobRecord]:
        """Return all queued jobs of all tenants, in order of submission."""
        return await self.read(lambda c: jobs.in_states(c, {JobState.QUEUED}))

    async def live(self) -> list[JobRecord]:
        """Return all jobs with resources, of all tenants, in order of submission."""
        return await self.read(lambda c: jobs.in_states(c, LIVE_STATES))

    async def changes(self, tenant: str | None, job_id: str, after: int = 0) -> list[JobChange]:
        """Return the changes of one job after a number, oldest first."""
        _check_job_id(job_id)
        return await self.read(lambda c: jobs.changes_of(c, tenant, job_id, _number(after)))

    async def tenant_changes(self, tenant: str, after: int, limit: int) -> list[JobChange]:
        """Return changes of all jobs of a tenant after a number, oldest first."""
        return await self.read(lambda c: changes.of_tenant(c, tenant, _number(after), limit))

    async def newest_change(self, tenant: str) -> int:
        """Return the newest change number of a tenant's jobs; 0: there is none."""
        return await self.read(lambda c: changes.newest(c, tenant))

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

    def _notify(self, job: JobRecord) -> None:
        self.changed.notify()


def _states(expected: JobState | Collection[JobState]) -> frozenset[JobState]:
    return frozenset({expected}) if isinstance(expected, JobState) else frozenset(expected)


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
