from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys

import pytest

from palestra.database import database
from palestra.errors import ConfigError, StoreError, StoreUnreachable, Superseded
from palestra.types.states import JobState
from palestra_service.store import backends
from palestra_service.store.control_store import ControlStore
from unit.control.building import change_numbers, cut_sessions, pg_ctl, submit

HOLD = """
import sys, time
from palestra_service.store.control_store import ControlStore
store = ControlStore(sys.argv[1])
print("mine", flush=True)
time.sleep(60)
"""


@pytest.fixture
def quick_lock(monkeypatch):
    monkeypatch.setattr(backends, "LOCK_SECONDS", 0.2)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "mysql://u:hunter2@h/d",
        "postgresql:/x",
        "://",
        "http://u:hunter2@h:notaport/d",
    ],
)
def test_a_url_that_can_not_be_used_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError) as caught:
        ControlStore(url)
    assert "hunter2" not in str(caught.value)


def test_a_password_stands_in_no_error(monkeypatch):
    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.1)
    with pytest.raises(StoreUnreachable) as caught:
        ControlStore("postgresql://u:hunter2@127.0.0.1:1/d")
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.slow
def test_a_second_scheduler_is_refused_and_told_by_whom(url, quick_lock):
    with subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "mine\n"
            with pytest.raises(StoreError, match=f"{other.pid}.*--database"):
                ControlStore(url)
            os.kill(other.pid, signal.SIGSTOP)  # it may wake up again, and write
            with pytest.raises(StoreError, match="in use"):
                ControlStore(url)
        finally:
            other.kill()
    ControlStore(url).close()


def test_in_one_process_too(url, quick_lock):
    with ControlStore(url), pytest.raises(StoreError):
        ControlStore(url)
    ControlStore(url).close()


def test_the_file_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "deep" / "folder" / "control.db"
    with ControlStore(f"sqlite:///{path}"):
        assert {p.name: stat.S_IMODE(p.stat().st_mode) & 0o077 for p in path.parent.iterdir()} == {
            "control.db": 0,
            "control.db-wal": 0,
            "control.db-shm": 0,
            "control.db.lock": 0,
        }


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "control.db"
    path.write_bytes(b"my thesis" * 1000)
    with pytest.raises(StoreError, match="a database"):
        ControlStore(f"sqlite:///{path}")
    assert path.read_bytes() == b"my thesis" * 1000
    with pytest.raises(ConfigError, match="be opened"):
        ControlStore(f"sqlite:///{tmp_path}")


@pytest.mark.slow
def test_commits_are_on_disk(tmp_path, postgres_url):
    with ControlStore(f"sqlite:///{tmp_path / 'c.db'}") as store, store._db._backend.engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert raw.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    opened = backends.open_backend(postgres_url)
    with opened.engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    opened.close()


async def test_a_store_without_room_says_so_and_goes_on_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.2)
    with ControlStore(f"sqlite:///{tmp_path / 'c.db'}") as store:
        await submit(store)
        await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1"))
        with pytest.raises(StoreUnreachable):
            await asyncio.gather(*(submit(store, config={"x": "y" * 100_000}) for _ in range(50)))
        await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 100000"))
        await submit(store)
    with sqlite3.connect(tmp_path / "c.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


@pytest.mark.slow
async def test_a_session_that_is_cut_off_is_replaced_and_nothing_is_lost_or_doubled(postgres_url):
    with ControlStore(postgres_url) as store:
        await submit(store)

        async def work():
            for _ in range(20):
                job = await submit(store)
                await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "")
                await store.jobs("a")

        workers = [asyncio.create_task(work()) for _ in range(4)]
        cuts = 0
        while not all(worker.done() for worker in workers):
            cuts += await asyncio.to_thread(cut_sessions, postgres_url) > 0
            await asyncio.sleep(0.1)
        await asyncio.gather(*workers)
        assert cuts > 1
        assert len(await store.live()) == 80
        assert await change_numbers(store) == list(range(1, 162))


async def test_who_lost_its_session_to_another_scheduler_writes_no_more(postgres_url, quick_lock, monkeypatch):
    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.5)
    with ControlStore(postgres_url) as former:
        await submit(former)
        cut_sessions(postgres_url)
        monkeypatch.setattr(backends, "_this_process", lambda: "1.*machine")
        with ControlStore(postgres_url) as present:
            monkeypatch.undo()
            monkeypatch.setattr(backends, "LOCK_SECONDS", 0.2)
            with pytest.raises(StoreError, match=r"1.*machine"):
                await submit(former)
            await submit(present)
            assert len(await present.queue()) == 2
        with pytest.raises(Superseded):  # although the lock is free
            await submit(former)


def test_a_session_of_its_own_that_is_not_yet_gone_is_waited_for(postgres_url, quick_lock):
    import psycopg

    with psycopg.connect(postgres_url) as ghost:
        assert ghost.execute("SELECT pg_try_advisory_lock(%s)", (backends.LOCK_NUMBER,)).fetchone() == (True,)
        with pytest.raises(StoreUnreachable, match="cut off"):
            backends._lock_session(psycopg.connect(postgres_url), {ghost.info.backend_pid})
    ControlStore(postgres_url).close()


async def test_a_server_that_falls_and_is_started_again_is_waited_for(postgres, postgres_url):
    with ControlStore(postgres_url) as store:
        falling = asyncio.create_task(asyncio.to_thread(pg_ctl, postgres, "restart"))
        count = 0
        while not falling.done():
            await submit(store)
            count += 1
            assert len((await store.jobs("a", limit=500)).jobs) == min(count, 500)
        await falling
        await submit(store)
        assert len(await store.queue()) == count + 1
        assert await change_numbers(store) == list(range(1, count + 2))
