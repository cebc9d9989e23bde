from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace

import pytest
import sqlalchemy as sa

from palestra.database import Backend, Database, Schema, database, shielded
from palestra.database.sqlite import open_engine
from palestra.errors import Conflict, StoreError, StoreUnreachable

METADATA = sa.MetaData()
NUMBERS = sa.Table("numbers", METADATA, sa.Column("n", sa.Integer, primary_key=True))
SCHEMA = Schema(
    store="test store",
    metadata=METADATA,
)


def in_words(error: Exception) -> Exception:
    return StoreError(f"explained: {error.orig}") if isinstance(error, sa.exc.DBAPIError) else error


def backend(path, **changes) -> Backend:
    return Backend(
        engine=open_engine(path, "NORMAL"),
        read_engine=open_engine(path, "NORMAL", read_only=True),
        readers=1,
        explain=in_words,
        **changes,
    )


@pytest.fixture
def db(tmp_path):
    opened = Database(backend(tmp_path / "x.db"), SCHEMA)
    yield opened
    opened.close()


def add(number: int):
    return lambda connection: connection.execute(NUMBERS.insert(), {"n": number}) and number


def numbers(connection: sa.Connection) -> list[int]:
    return list(connection.execute(sa.select(NUMBERS.c.n).order_by(NUMBERS.c.n)).scalars())


async def test_a_read_sees_every_write_that_was_awaited(db):
    for number in range(5):
        before = db.commits
        assert await db.write(add(number)) == number
        assert db.commits > before
        assert await db.read(numbers) == db.query(numbers) == list(range(number + 1))


async def test_what_was_committed_is_there_after_opening_again(tmp_path):
    for number in range(2):
        db = Database(backend(tmp_path / "x.db"), SCHEMA)
        await db.write(add(number))
        db.close()
    db = Database(backend(tmp_path / "x.db"), SCHEMA)
    assert db.query(numbers) == [0, 1]
    db.close()


async def test_an_error_of_ours_is_raised_as_it_is_and_one_of_the_database_in_words(db):
    def refuse(connection):
        raise Conflict("no")

    def wrong(connection):
        connection.exec_driver_sql("NONSENSE")

    for run in (db.write, db.read):
        with pytest.raises(Conflict, match="no"):
            await run(refuse)
        with pytest.raises(StoreError, match="explained") as caught:
            await run(wrong)
        assert caught.value.__cause__ is None  # the statement's values may be secrets
    assert await db.write(add(1)) == 1


async def test_a_reader_can_not_write(db):
    with pytest.raises(StoreError, match="readonly"):
        await db.read(add(1))


async def test_a_caller_that_is_cancelled_does_not_take_its_write_back(db):
    task = asyncio.ensure_future(db.write(add(1)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await db.write(add(2))
    assert await db.read(numbers) == [1, 2]


async def test_a_database_that_does_not_answer_is_tried_again(tmp_path, monkeypatch):
    db = Database(backend(tmp_path / "x.db", bounded=True), SCHEMA)
    really, failures = db.submit, 3

    def submit(operation, tag=None):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StoreUnreachable("away")
        return really(operation, tag)

    monkeypatch.setattr(db, "submit", submit)
    assert await db.write(add(1)) == 1
    failures = 10**9
    monkeypatch.setattr(database, "LONGEST_REPLY_SECONDS", 0.1)
    with pytest.raises(StoreUnreachable):
        await db.write(add(2))
    assert await db.read(numbers) == [1]
    db.close()


async def test_a_closed_database_says_so(db):
    db.close()
    for run in (db.write, db.read):
        with pytest.raises(StoreError, match="closed"):
            await run(numbers)


async def test_a_database_that_is_lost_acknowledges_nothing_more(tmp_path):
    lost: list[StoreError] = []
    db = Database(backend(tmp_path / "x.db", watch=lambda: lambda: lost[0] if lost else None), SCHEMA)
    await db.write(add(1))
    losing = asyncio.ensure_future(db.lost())
    await asyncio.sleep(0)
    lost.append(StoreError("gone"))
    with pytest.raises(StoreError, match="gone"):
        await db.write(add(2))
    assert str(await asyncio.wait_for(losing, 5)) == "gone"
    db.close()


@pytest.mark.parametrize("wrong", ["version", "watch"])
def test_a_database_that_can_not_be_opened_is_let_go(tmp_path, wrong):
    Database(backend(tmp_path / "x.db"), SCHEMA).close()
    released: list[bool] = []
    schema = replace(SCHEMA, read_version=lambda connection: 1) if wrong == "version" else SCHEMA
    watch = (lambda: 1 // 0) if wrong == "watch" else (lambda: lambda: None)
    with pytest.raises((StoreError, ZeroDivisionError)):
        Database(backend(tmp_path / "x.db", watch=watch, release=lambda: released.append(True)), schema)
    assert released == [True]
    with sqlite3.connect(tmp_path / "x.db") as other:
        assert other.execute("PRAGMA user_version").fetchone() == (SCHEMA.version,)
    other.close()


async def test_a_shielded_method_goes_on_when_its_caller_is_cancelled():
    reached: list[int] = []

    @shielded
    async def work(number: int) -> int:
        await asyncio.sleep(0.01)
        reached.append(number)
        return number

    task = asyncio.ensure_future(work(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == []
    await asyncio.sleep(0.05)
    assert reached == [1]
    assert await work(2) == 2
