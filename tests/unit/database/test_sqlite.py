from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from palestra.database.sqlite import open_engine, sqlite_connection
from palestra.errors import StoreError


def test_a_transaction_that_can_not_begin_fails_with_the_error_of_sqlalchemy(tmp_path):
    engine = open_engine(tmp_path / "file.db", "NORMAL")
    with engine.begin() as connection:
        sqlite_connection(connection).execute("CREATE TABLE t (x)")
        assert sqlite_connection(connection).in_transaction
    other = sqlite3.connect(tmp_path / "file.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with engine.connect() as connection:
        sqlite_connection(connection).execute("PRAGMA busy_timeout=0")
        with pytest.raises(sa.exc.OperationalError, match="locked") as error, connection.begin():
            pass
        assert isinstance(error.value.orig, sqlite3.OperationalError)
        other.execute("COMMIT")
        with connection.begin():
            sqlite_connection(connection).execute("INSERT INTO t VALUES (1)")
    assert other.execute("SELECT count(*) FROM t").fetchone() == (1,)
    other.close()
    engine.dispose()


def test_a_python_whose_sqlite_is_too_old_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(StoreError, match=r"SQLite.*3\.34\.1.*3\.35"):
        open_engine(tmp_path / "run.db", "FULL")
