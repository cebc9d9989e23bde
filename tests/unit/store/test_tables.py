from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.database.sqlite import open_engine
from palestra.errors import StoreError
from palestra.store import tables
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


def test_a_file_of_a_newer_palestra_is_refused_and_left_alone(tmp_path):
    open_store(tmp_path).close()
    set_version(tmp_path / "run.db", SCHEMA.version + 1)
    with pytest.raises(StoreError, match=rf"version {SCHEMA.version + 1}.*upgrade"):
        open_store(tmp_path)
    assert version_of(tmp_path / "run.db") == SCHEMA.version + 1


def test_an_older_file_goes_through_every_migration_after_its_own(monkeypatch, tmp_path):
    open_store(tmp_path).close()
    known = SCHEMA.version
    more = (
        ("ALTER TABLE meta ADD COLUMN two TEXT",),
        ("ALTER TABLE meta ADD COLUMN three TEXT", "DELETE FROM meta"),
    )
    monkeypatch.setattr(tables, "SCHEMA", replace(SCHEMA, migrations=(*SCHEMA.migrations, *more)))
    open_store(tmp_path).close()
    assert version_of(tmp_path / "run.db") == known + 2
    assert any("three TEXT" in s for s in schema(tmp_path / "run.db"))
    open_store(tmp_path).close()  # not a second time


async def test_manifests_of_a_version_that_had_one_policy_have_its_name(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "learner" / "run_of_3c2c73b" / "run.db", tmp_path / "run.db")
    with sqlite3.connect(tmp_path / "run.db") as db:
        before = db.execute("SELECT step, incarnation, n, episode_ids FROM manifests ORDER BY step").fetchall()
    db.close()
    assert len(before) == 2
    with open_store(tmp_path) as store:
        for step, incarnation, n, episode_ids in before:
            found = await store.log.manifest(step)
            assert found.versions == {"policy": (incarnation, n)}
            assert list(found.episode_ids) == json.loads(episode_ids)
    made = tmp_path / "made"
    made.mkdir()
    open_store(made).close()
    assert columns(tmp_path / "run.db") == columns(made / "run.db")


def columns(path) -> dict[str, set[str]]:
    """The names of the columns of each table."""
    with sqlite3.connect(path) as db:
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in names}
    db.close()
    return found


def test_a_migration_that_fails_leaves_the_file_as_it_was(monkeypatch, tmp_path):
    open_store(tmp_path).close()
    before = schema(tmp_path / "run.db")
    known = SCHEMA.version
    failing = ("ALTER TABLE meta ADD COLUMN two TEXT", "NONSENSE")
    monkeypatch.setattr(tables, "SCHEMA", replace(SCHEMA, migrations=(*SCHEMA.migrations, failing)))
    with pytest.raises(StoreError):
        open_store(tmp_path)
    assert schema(tmp_path / "run.db") == before
    assert version_of(tmp_path / "run.db") == known


def test_the_caller_decides_about_the_transaction(tmp_path):
    engine = open_engine(tmp_path / "x.db", "NORMAL")
    with engine.connect() as connection, connection.begin() as transaction:
        SCHEMA.migrate(connection)
        transaction.rollback()
    engine.dispose()
    assert version_of(tmp_path / "x.db") == 0
