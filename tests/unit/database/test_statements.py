from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy import bindparam, select

from palestra.database.sqlite import Prepared, open_engine
from palestra.store.tables import meta

INSERT = Prepared(meta.insert())
ONE = Prepared(select(meta).where(meta.c.key == bindparam("key")))
FIRST = Prepared(select(meta).where(meta.c.value != "no").order_by(meta.c.key).limit(1))
UPDATE = Prepared(sa.update(meta).where(meta.c.key == bindparam("k")).values(value=bindparam("v")))


@pytest.fixture
def connection(tmp_path):
    engine = open_engine(tmp_path / "t.db", "NORMAL")
    with engine.begin() as connection:
        meta.create(connection)
        yield connection
    engine.dispose()


def test_rows_have_the_columns_by_name(connection):
    for key, value in (("a", "no"), ("b", "x"), ("c", "y")):
        assert INSERT.change(connection, {"key": key, "value": value}) == 1
    found = ONE.row(connection, {"key": "b"})
    assert (found.key, found.value) == ("b", "x")
    assert ONE.row(connection, {"key": "z"}) is None
    assert [(row.key, row.value) for row in FIRST.rows(connection, {})] == [("b", "x")]  # values of its own


def test_a_change_says_how_many_rows_it_touched(connection):
    INSERT.change(connection, {"key": "a", "value": "x"})
    assert UPDATE.change(connection, {"k": "a", "v": "y"}) == 1
    assert UPDATE.change(connection, {"k": "b", "v": "y"}) == 0
    assert ONE.row(connection, {"key": "a"}).value == "y"


def test_many_rows_are_changed_at_once_and_a_change_may_return_its_row(connection):
    INSERT.change_many(connection, ({"key": key, "value": "x"} for key in "ab"))
    returning = Prepared(sa.update(meta).where(meta.c.key == bindparam("k")).values(value="y").returning(meta.c.value))
    assert returning.row(connection, {"k": "b"}).value == "y"
    assert returning.row(connection, {"k": "c"}) is None
    assert ONE.row(connection, {"key": "a"}).value == "x"
    with pytest.raises(sa.exc.IntegrityError, match="UNIQUE"):
        INSERT.change_many(connection, [{"key": "a", "value": "y"}])


def test_it_is_part_of_the_transaction_of_its_connection(tmp_path):
    engine = open_engine(tmp_path / "t.db", "NORMAL")
    with engine.begin() as connection:
        meta.create(connection)
    with engine.connect() as connection, connection.begin() as transaction:
        INSERT.change(connection, {"key": "a", "value": "x"})
        transaction.rollback()
    with engine.begin() as connection:
        assert ONE.row(connection, {"key": "a"}) is None
    engine.dispose()


def test_errors_are_of_the_kinds_that_sqlalchemy_raises(connection):
    INSERT.change(connection, {"key": "a", "value": "x"})
    with pytest.raises(sa.exc.IntegrityError, match="UNIQUE"):
        INSERT.change(connection, {"key": "a", "value": "y"})
    meta.drop(connection)
    with pytest.raises(sa.exc.OperationalError, match="such table"):
        ONE.row(connection, {"key": "a"})


def test_a_value_that_is_missing_is_an_error(connection):
    with pytest.raises(KeyError):
        INSERT.change(connection, {"key": "a"})
