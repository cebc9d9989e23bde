"""Every class of errors of both databases is in one table, and what follows from it happens."""

from __future__ import annotations

import sqlite3

import pytest

from palestra.database import database
from palestra.errors import ServerFailed, StoreError, StoreUnreachable
from palestra.types.states import JobState
from palestra_service.jobs import scheduler as scheduler_module
from palestra_service.jobs.launcher import Ending
from palestra_service.store.backends import POSTGRES, Follows, what_follows
from palestra_service.store.control_store import ControlStore
from unit.control.building import cut_sessions, submit
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, is_true, scheduling
from unit.waiting import until


def test_every_class_of_postgresqls_errors_is_in_the_table():
    errors = pytest.importorskip("psycopg").errors
    states = [getattr(kind, "sqlstate", None) for kind in vars(errors).values()]
    known = {state for state in states if isinstance(state, str)}
    assert {state[:2] for state in known} <= POSTGRES.keys()
    assert {state for state in POSTGRES if len(state) == 5} <= known


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        ("ReadOnlySqlTransaction", Follows.RECONNECT),
        ("LockNotAvailable", Follows.AGAIN),
        ("QueryCanceled", Follows.AGAIN),
        ("DeadlockDetected", Follows.AGAIN),
        ("DiskFull", Follows.AGAIN),
        ("TooManyConnections", Follows.AGAIN),
        ("AdminShutdown", Follows.RECONNECT),
        ("CannotConnectNow", Follows.RECONNECT),
        ("IdleInTransactionSessionTimeout", Follows.RECONNECT),
        ("OperationalError", Follows.RECONNECT),
        ("ConnectionTimeout", Follows.RECONNECT),
        ("InsufficientPrivilege", Follows.REFUSED),
        ("DataCorrupted", Follows.REFUSED),
        ("UniqueViolation", Follows.DEFECT),
        ("SyntaxError", Follows.DEFECT),
        ("DataError", Follows.DEFECT),
    ],
)
def test_what_follows_from_an_error_of_postgresql(name, follows):
    assert what_follows(getattr(pytest.importorskip("psycopg").errors, name)()) is follows


@pytest.mark.parametrize(
    ("code", "follows"),
    [
        (sqlite3.SQLITE_BUSY_SNAPSHOT, Follows.AGAIN),
        (sqlite3.SQLITE_READONLY, Follows.AGAIN),
        (sqlite3.SQLITE_FULL, Follows.AGAIN),
        (sqlite3.SQLITE_CORRUPT, Follows.REFUSED),
        (sqlite3.SQLITE_NOTADB, Follows.REFUSED),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, Follows.DEFECT),
    ],
)
def test_what_follows_from_an_error_of_sqlite(code, follows):
    error = sqlite3.OperationalError()
    error.sqlite_errorcode = code
    assert what_follows(error) is follows


async def test_a_file_that_another_process_has_locked_is_unreachable_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.3)
    path = tmp_path / "c.db"
    with ControlStore(f"sqlite:///{path}") as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnreachable):
            await submit(store)
        other.execute("COMMIT")
        other.close()
        monkeypatch.undo()
        await submit(store, name="later")
        assert [job.name for job in await store.queue()][-1] == "later"


@pytest.mark.parametrize("error", [StoreError("damaged"), StoreUnreachable("away"), ValueError("a defect")])
async def test_a_write_that_fails_in_a_round_ends_no_scheduler(sqlite_store, tmp_path, monkeypatch, error):
    """The time limit of a job is over just then."""
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.01)
    launcher, failures, really = FakeLauncher(), [error] * 3, sqlite_store.request_cancel

    async def broken(*arguments):
        if failures:
            raise failures.pop()
        return await really(*arguments)

    monkeypatch.setattr(sqlite_store, "request_cancel", broken)
    async with scheduling(sqlite_store, tmp_path, launcher):
        job = await submit(sqlite_store, time_limit_seconds=1.0)
        await until(in_state(sqlite_store, job.job_id, JobState.RUNNING))
        sqlite_store.clock.advance(10)
        await until(in_state(sqlite_store, job.job_id, JobState.CANCELLED))
    assert failures == []


@pytest.mark.parametrize("error", [StoreUnreachable("u"), ServerFailed("u"), RuntimeError("u")])
async def test_healthz_says_what_can_not_be_done(http, plane, error):
    assert (await http.get("/healthz")).status_code == 200
    plane.scheduler._failure = error
    answer = await http.get("/healthz", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["status"]) == (503, "failing")
    assert answer.json()["problem"].endswith("started")


@pytest.mark.slow
async def test_a_scheduler_outlives_a_database_that_is_read_only(postgres_url, tmp_path, monkeypatch):
    import psycopg

    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.5)
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.05)
    launcher = FakeLauncher()

    def read_only(on: bool) -> None:
        with psycopg.connect(postgres_url, autocommit=True, options="-c default_transaction_read_only=off") as admin:
            admin.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
            admin.execute("SELECT pg_reload_conf()")

    with ControlStore(postgres_url) as store:
        async with scheduling(store, tmp_path, launcher) as scheduler:
            job = await submit(store, time_limit_seconds=3.0)
            await until(in_state(store, job.job_id, JobState.RUNNING))
            try:
                read_only(True)
                cut_sessions(postgres_url)
                await until(lambda: is_true(scheduler.problem is not None))
                with pytest.raises(StoreUnreachable):
                    await submit(store)
            finally:
                read_only(False)
            await until(in_state(store, job.job_id, JobState.CANCELLED))
            other = await submit(store)
            await until(in_state(store, other.job_id, JobState.RUNNING))
            launcher.end(other.job_id, Ending.COMPLETED)
            await until(in_state(store, other.job_id, JobState.COMPLETED))
