from __future__ import annotations

import asyncio
import sqlite3
import threading
from functools import partial

import pytest
import sqlalchemy as sa

from palestra.database.sqlite import open_engine, sqlite_connection, transaction
from palestra.database.writer import MAX_BATCH, Writer
from palestra.errors import Conflict, StoreError
from palestra.store.run_store import store_error


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(tmp_path / "t.db", "NORMAL")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x INTEGER PRIMARY KEY)")
    yield engine
    engine.dispose()


@pytest.fixture(params=[sa.Connection.begin, transaction], ids=["sqlalchemy", "sqlite"])
def writer(engine, tmp_path, request):
    writer = Writer(engine, partial(store_error, tmp_path / "t.db"), transaction=request.param)
    yield writer
    writer.close()


def insert(x: int):
    def run(connection: sa.Connection) -> int:
        connection.exec_driver_sql(f"INSERT INTO t VALUES ({x})")
        return x * 10

    return run


def values(path) -> list[int]:
    engine = open_engine(path, "NORMAL", read_only=True)
    with engine.begin() as connection:
        found = [row[0] for row in connection.exec_driver_sql("SELECT x FROM t ORDER BY x")]
    engine.dispose()
    return found


class Gate:
    """An operation that keeps the writer busy until it is opened, so that what follows gathers."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def run(self, connection: sa.Connection) -> None:
        self.reached.set()
        assert self.opened.wait(10)

    async def closed(self, writer: Writer) -> asyncio.Task[None]:
        task = asyncio.ensure_future(writer.submit(self.run))
        await asyncio.to_thread(self.reached.wait, 10)
        return task


async def gathered(writer: Writer, operations) -> list:
    """Submit operations so that they are committed together; their results or errors."""
    gate = Gate()
    blocking = await gate.closed(writer)
    tasks = [asyncio.ensure_future(writer.submit(operation)) for operation in operations]
    await asyncio.sleep(0)
    gate.opened.set()
    await blocking
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_result_is_on_disk_when_it_is_returned(writer, tmp_path):
    assert await writer.submit(insert(4)) == 40
    assert values(tmp_path / "t.db") == [4]


async def test_many_operations_share_one_commit(writer, tmp_path):
    assert await gathered(writer, [insert(x) for x in range(100)]) == [x * 10 for x in range(100)]
    assert writer.commits == 2  # the gate's and theirs
    assert values(tmp_path / "t.db") == list(range(100))


async def test_no_group_is_larger_than_its_limit(writer):
    await gathered(writer, [insert(x) for x in range(MAX_BATCH + 1)])
    assert writer.commits == 3


async def test_operations_run_in_the_order_in_which_they_came(writer):
    order: list[int] = []
    await gathered(writer, [lambda _, x=x: order.append(x) for x in range(50)])
    assert order == list(range(50))


async def test_an_operation_that_is_refused_takes_no_other_with_it(writer, tmp_path):
    def refuse(connection: sa.Connection) -> None:
        raise Conflict("no")

    found = await gathered(writer, [insert(1), refuse, insert(2)])
    assert found[0] == 10
    assert isinstance(found[1], Conflict)
    assert found[2] == 20
    assert values(tmp_path / "t.db") == [1, 2]
    assert writer.commits == 2


async def test_an_operation_that_breaks_after_writing_takes_no_other_with_it_and_leaves_nothing(writer, tmp_path):
    def break_down(connection: sa.Connection) -> None:
        insert(99)(connection)
        raise ZeroDivisionError

    found = await gathered(writer, [insert(1), break_down, insert(1), insert(2)])
    assert found[0] == 10
    assert isinstance(found[1], ZeroDivisionError)
    assert isinstance(found[2], sa.exc.IntegrityError)  # 1 is there already
    assert found[3] == 20
    assert values(tmp_path / "t.db") == [1, 2]


async def test_an_operation_that_is_tried_again_is_told_what_came_of_the_second_try(writer, tmp_path):
    """The first try saw a row that was taken back when another operation broke."""
    tries = []

    def only_once(connection: sa.Connection) -> None:
        tries.append(1)
        if len(tries) > 1:
            raise ZeroDivisionError
        insert(1)(connection)

    def if_empty(connection: sa.Connection) -> int:
        if connection.exec_driver_sql("SELECT count(*) FROM t").scalar_one():
            raise Conflict("not empty")
        return insert(2)(connection)

    found = await gathered(writer, [only_once, if_empty, lambda _: 1 // 0])
    assert found[1] == 20
    assert [type(f) for f in (found[0], found[2])] == [ZeroDivisionError] * 2
    assert values(tmp_path / "t.db") == [2]


async def test_the_writer_goes_on_after_an_error(writer, tmp_path):
    with pytest.raises(ZeroDivisionError):
        await writer.submit(lambda _: 1 // 0)
    assert await writer.submit(insert(7)) == 70


async def test_a_caller_that_is_cancelled_does_not_take_its_operation_back(writer, tmp_path):
    gate = Gate()
    blocking = await gate.closed(writer)
    task = asyncio.ensure_future(writer.submit(insert(5)))
    await asyncio.sleep(0)
    task.cancel()
    gate.opened.set()
    await blocking
    with pytest.raises(asyncio.CancelledError):
        await task
    await writer.submit(insert(6))
    assert values(tmp_path / "t.db") == [5, 6]


async def test_closing_finishes_what_was_submitted_and_refuses_the_rest(engine, tmp_path):
    writer = Writer(engine, lambda error: error)
    tasks = [asyncio.ensure_future(writer.submit(insert(x))) for x in range(20)]
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    assert await asyncio.gather(*tasks) == [x * 10 for x in range(20)]
    with pytest.raises(StoreError, match="closed"):
        await writer.submit(insert(99))
    assert values(tmp_path / "t.db") == list(range(20))


async def test_the_event_loop_does_not_wait_for_the_disk(writer):
    gate = Gate()
    blocking = await gate.closed(writer)
    async with asyncio.timeout(60):
        for _ in range(100):
            await asyncio.sleep(0)
    assert not blocking.done()
    gate.opened.set()
    await blocking


async def test_two_event_loops_may_use_one_writer(writer, tmp_path):
    async def other() -> int:
        return await writer.submit(insert(2))

    mine, theirs = await asyncio.gather(writer.submit(insert(1)), asyncio.to_thread(asyncio.run, other()))
    assert (mine, theirs) == (10, 20)
    assert values(tmp_path / "t.db") == [1, 2]


def pragma(path, synchronous: str) -> tuple[str, int]:
    engine = open_engine(path, synchronous)
    with engine.connect() as connection:
        found = (
            connection.exec_driver_sql("PRAGMA journal_mode").scalar_one(),
            connection.exec_driver_sql("PRAGMA synchronous").scalar_one(),
        )
    engine.dispose()
    return found


def test_the_levels_of_the_promises_are_set(tmp_path):
    assert pragma(tmp_path / "a.db", "FULL") == ("wal", 2)
    assert pragma(tmp_path / "b.db", "NORMAL") == ("wal", 1)


def test_a_reader_can_not_write(tmp_path, engine):
    reader = open_engine(tmp_path / "t.db", "FULL", read_only=True)
    with pytest.raises(sa.exc.OperationalError, match="readonly"), reader.begin() as connection:
        connection.exec_driver_sql("INSERT INTO t VALUES (1)")
    reader.dispose()


@pytest.mark.parametrize("name", ["a b", "50%", "%20", "a#b", "a?b", "a?mode=memory", "é", "a&b=c", "'\""])
def test_the_path_may_have_any_characters(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    engine = open_engine(folder / "t.db", "NORMAL")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x INTEGER)")
    engine.dispose()
    assert values(folder / "t.db") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


async def test_statements_of_the_driver_are_committed_with_those_of_sqlalchemy_or_not_at_all(engine, writer):
    def driver(x: int, fails: bool = False):
        def run(connection):
            sqlite_connection(connection).execute("INSERT INTO t VALUES (?)", (x,))
            assert not fails

        return run

    await asyncio.gather(writer.submit(driver(1)), writer.submit(insert(2)), writer.submit(driver(3)))
    with pytest.raises(AssertionError):
        await writer.submit(driver(4, fails=True))
    await asyncio.gather(*(writer.submit(driver(x, fails=x == 6)) for x in (5, 6, 7)), return_exceptions=True)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT x FROM t ORDER BY x").scalars().all() == [1, 2, 3, 5, 7]


async def test_the_writer_goes_on_after_a_commit_that_failed(tmp_path):
    engine = open_engine(tmp_path / "t.db", "NORMAL")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE u (x REFERENCES t (x) DEFERRABLE INITIALLY DEFERRED)")

    def strict(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA foreign_keys=ON")  # so that COMMIT fails, and no statement before it

    sa.event.listen(engine, "connect", strict)
    engine.dispose()
    writer = Writer(engine, partial(store_error, tmp_path / "t.db"), transaction=transaction)
    with pytest.raises(sa.exc.IntegrityError):
        await writer.submit(lambda connection: connection.exec_driver_sql("INSERT INTO u VALUES (1)") and None)
    assert await writer.submit(insert(1)) == 10
    writer.close()
    engine.dispose()
    assert values(tmp_path / "t.db") == [1]
