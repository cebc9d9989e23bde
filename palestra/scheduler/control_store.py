"""The control store as the scheduler and its API see it: asynchronous, every change on disk when it returns.

One process has the store at a time (see `backends`), and in that process one thread writes, with group commit. A
database that goes away for a moment is waited for. SQLite runs with `synchronous=FULL` and PostgreSQL with
`synchronous_commit=on`: what was answered survives the loss of power.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Self, TypeVar, Unpack

import sqlalchemy as sa

from palestra.database import Database, Notifier, shielded
from palestra.errors import InvalidRequest, NotFound
from palestra.scheduler import audit, jobs, tables
from palestra.scheduler.audit import AuditEntry
from palestra.scheduler.backends import open_backend
from palestra.scheduler.job_requests import check_request
from palestra.scheduler.stored_text import can_match, check_identifier, check_name
from palestra.schemas.clock import Clock, SystemClock
from palestra.schemas.jobs import (
    LIVE_STATES,
    JobChange,
    JobFields,
    JobKind,
    JobPage,
    JobRecord,
    JobRequest,
)
from palestra.schemas.states import JobState

T = TypeVar("T")
MOST_ROWS = 500  # of one page
LARGEST_NUMBER = 2**31 - 1  # of a change, or of a line of the audit log


class ControlStore:
    """Jobs, their changes, and the audit log, in SQLite or PostgreSQL.

    Raises (also every method): StoreError, StoreUnreachable.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.changed = Notifier()  # a job was submitted, moved, or is to be cancelled
        self._db = Database(open_backend(url), tables.SCHEMA)

    def close(self) -> None:
        """Finish what was submitted, and let another process have the store."""
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
        """Run an operation on the writing thread, and then, on the event loop, what follows from its commit.

        Both are done even if the caller is cancelled.

        Args:
            operation: may be run a second time where the database did not say whether it had committed.
            then: is called with the operation's result when it is on disk. None: nothing follows.
            tag: names the fault points before and after the commit.
        """
        result = await self._db.write(operation, tag)
        if then is not None:
            then(result)
        return result

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a query on a connection of its own; it sees every change that was awaited before."""
        return await self._db.read(operation)

    # Jobs

    async def submit_job(
        self,
        tenant: str,
        user: str,
        request: JobRequest,
        request_key: str | None = None,
        most_open: int | None = None,
    ) -> JobRecord:
        """A new job in QUEUED. The same `request_key` with the same request gives the same job.

        Args:
            tenant: whose it is.
            user: who submits it.
            request: what is asked for.
            request_key: the client's idempotency key; it counts within the tenant.
            most_open: how many jobs of the user may be not over, this one included. None: any number.

        Raises:
            InvalidRequest, PayloadTooLarge: the request can't be kept.
            Conflict: the key was used for another request, or by another user.
            TooManyRequests: the user has `most_open` jobs that are not over.
        """
        check_identifier(tenant, "tenant")
        check_identifier(user, "user")
        check_request(request)
        if request_key is not None:
            check_name(request_key, "idempotency_key")
        job_id, now = f"job-{secrets.token_hex(8)}", self.clock.now()
        return await self.write(
            lambda c: jobs.submit(c, tenant, user, request, job_id, request_key, most_open, now),
            self._notify,
            "job_commit",
        )

    async def job(self, tenant: str | None, job_id: str) -> JobRecord:
        """One job; of any tenant where that is None, which is for the scheduler alone.

        Raises:
            NotFound: there is none, or it is another tenant's.
        """
        _check_job_id(job_id)
        return await self.read(lambda c: jobs.read(c, tenant, job_id))

    async def jobs(
        self,
        tenant: str,
        *,
        states: Collection[JobState] = (),
        user: str | None = None,
        name: str | None = None,
        kind: JobKind | None = None,
        cursor: str | None = None,
        limit: int = 50,
        viewer: str | None = None,
    ) -> JobPage:
        """A tenant's jobs, newest first. Pages stay as they are while jobs are added.

        Of other users' private jobs the user `viewer` sees none; None: somebody who sees all.

        Raises:
            InvalidRequest: the limit is out of range, or the cursor is not of this list.
        """
        _check_limit(limit)
        equal = {"user_name": user, "name": name, "kind": kind}
        wanted = {column: value for column, value in equal.items() if value is not None}
        if cursor is not None and not can_match(cursor):
            raise InvalidRequest("this cursor is not of this list; begin again without one", "cursor")
        if not all(can_match(value) for value in wanted.values()):
            return JobPage(jobs=(), cursor=None)
        return await self.read(lambda c: jobs.page(c, tenant, wanted, states, cursor, limit, viewer))

    async def change_state(
        self,
        job_id: str,
        expected: JobState | Collection[JobState],
        following: JobState,
        reason: str,
        **fields: Unpack[JobFields],
    ) -> JobRecord:
        """Move a job if it is in a state that is expected, and record it, in one transaction.

        STARTING counts a start; a job that is no longer live has no URL.

        Raises:
            NotFound: there is no such job.
            Conflict: somebody was quicker; or it is to be cancelled and would go back to the queue.
            IllegalTransition: the lifecycle does not have this move.
        """
        _check_job_id(job_id)
        states, now = _states(expected), self.clock.now()
        change_id = secrets.token_hex(16)
        return await self.write(
            lambda c: jobs.change_state(c, job_id, change_id, states, following, reason, fields, now),
            self._notify,
            "job_commit",
        )

    async def request_cancel(self, tenant: str | None, job_id: str, reason: str) -> JobRecord:
        """A queued job is CANCELLED at once; a live one is marked for the scheduler; one that is over stays so.

        Raises:
            NotFound: there is no such job in this tenant.
        """
        _check_job_id(job_id)
        change_id, now = secrets.token_hex(16), self.clock.now()
        return await self.write(
            lambda c: jobs.request_cancel(c, tenant, job_id, change_id, reason, now), self._notify, "job_commit"
        )

    async def queue(self) -> list[JobRecord]:
        """All jobs that wait, of all tenants, in order of submission."""
        return await self.read(lambda c: jobs.in_states(c, {JobState.QUEUED}))

    async def live(self) -> list[JobRecord]:
        """All jobs that hold resources, of all tenants, in order of submission."""
        return await self.read(lambda c: jobs.in_states(c, LIVE_STATES))

    # Changes

    async def changes(self, tenant: str | None, job_id: str, after: int = 0) -> list[JobChange]:
        """What happened to one job, oldest first.

        Raises:
            NotFound: there is no such job in this tenant.
        """
        _check_job_id(job_id)
        return await self.read(lambda c: jobs.changes_of(c, tenant, job_id, _number(after)))

    # Audit

    async def append_audit(
        self, tenant: str, who: str, key_id: str | None, what: str, target: str, outcome: str
    ) -> None:
        """Write down who did what. Keys in any of it are made useless first."""
        entry_id = secrets.token_hex(16)
        entry = AuditEntry(
            number=0, at=self.clock.now(), who=who, key_id=key_id, what=what, target=target, outcome=outcome
        )
        await self.write(lambda c: audit.append(c, tenant, entry_id, entry))

    async def audit(self, tenant: str, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """A tenant's audit log, newest first, with smaller numbers than `before`."""
        _check_limit(limit)
        return await self.read(lambda c: audit.page(c, tenant, None if before is None else _number(before), limit))

    def _notify(self, job: JobRecord) -> None:
        self.changed.notify()


def _states(expected: JobState | Collection[JobState]) -> frozenset[JobState]:
    return frozenset({expected}) if isinstance(expected, JobState) else frozenset(expected)


def _number(given: int) -> int:
    """The nearest that both databases can compare with."""
    return min(max(given, 0), LARGEST_NUMBER)


def _check_job_id(job_id: str) -> None:
    """What no database has to be asked about.

    Raises:
        NotFound: it can't be the id of a job.
    """
    if not (can_match(job_id) and job_id.isascii() and job_id.isprintable()):
        raise NotFound("there is no such job")


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MOST_ROWS:
        raise InvalidRequest(f"limit is {limit}; it has to be from 1 to {MOST_ROWS}", "limit")
