from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from palestra.database import Schema
from palestra.database.sqlite import open_engine
from palestra.errors import StoreError
from palestra.store import tables
from palestra.store.browsing import browse
from palestra.store.tables import SCHEMA
from unit.building import open_store


def version_of(path) -> int:
    with sqlite3.connect(path) as db:
        found = db.execute("PRAGMA user_version").fetchone()[0]
    db.close()
    return found


def set_version(path, version: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


def schema(path) -> set[str]:
    with sqlite3.connect(path) as db:
        found = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    db.close()
    return found


def test_a_new_file_gets_all_tables_and_the_version(tmp_path):
    open_store(tmp_path).close()
    assert version_of(tmp_path / "run.db") == SCHEMA.version
    assert len([s for s in schema(tmp_path / "run.db") if s.strip().startswith("CREATE TABLE")]) == len(
        tables.metadata.tables
    )


def test_opening_again_changes_nothing(tmp_path):
    open_store(tmp_path).close()
    before = schema(tmp_path / "run.db")
    open_store(tmp_path).close()
    assert schema(tmp_path / "run.db") == before


def test_a_file_of_another_version_is_refused_and_left_alone(tmp_path):
    open_store(tmp_path).close()
    set_version(tmp_path / "run.db", SCHEMA.version + 1)
    with pytest.raises(StoreError):
        open_store(tmp_path)
    with pytest.raises(StoreError), browse(tmp_path / "run.db"):
        pass
    assert version_of(tmp_path / "run.db") == SCHEMA.version + 1


def test_the_caller_decides_about_the_transaction(tmp_path):
    engine = open_engine(tmp_path / "x.db", "NORMAL")
    with engine.connect() as connection, connection.begin() as transaction:
        SCHEMA.create(connection)
        transaction.rollback()
    engine.dispose()
    assert version_of(tmp_path / "x.db") == 0


def test_the_version_follows_from_the_tables_alone():
    def version(*columns: str, index: bool = False) -> int:
        metadata = sa.MetaData()
        sa.Table("things", metadata, *(sa.Column(name, sa.Integer, index=index) for name in columns))
        return Schema(store="x", metadata=metadata).version

    assert version("a") == version("a")
    assert len({version("a"), version("b"), version("a", "b"), version("a", index=True)}) == 4
    assert 0 < SCHEMA.version < 2**31
