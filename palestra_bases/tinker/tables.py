"""The tables of a Tinker server: everything acknowledged, to restore it after a kill."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
import sqlalchemy as sa
from sqlalchemy import Boolean, Column, Float, Index, Integer, LargeBinary, String, Table, Text

from palestra.config import AdapterConfig
from palestra.database import Backend, Database, Schema, to_json
from palestra.database.sqlite import make_private, open_engine
from palestra.disk import private_folder, writing
from palestra.errors import StoreError

R = TypeVar("R")


class Stored(sa.TypeDecorator[Any]):
    """A column of texts that stand for other values."""

    impl, cache_ok = Text, True

    def __init__(self, write: Callable[[Any], str], read: Callable[[str], Any]) -> None:
        super().__init__()
        self.write, self.read = write, read

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Return the text of a value, as SQLAlchemy asks for it."""
        return None if value is None else self.write(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Return the value of a text."""
        return None if value is None else self.read(value)


JSON = Stored(to_json, orjson.loads)
FOLDER = Stored(str, Path)
ADAPTER = Stored(AdapterConfig.model_dump_json, AdapterConfig.model_validate_json)
metadata = sa.MetaData()

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),  # last heartbeat
    Column("finished_at", Float),
    Column("data", JSON, nullable=False),  # the request
    Index("sessions_of_tenant", "tenant", "created_at"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base", String, nullable=False),
    Column("adapter", ADAPTER, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("data", JSON, nullable=False),  # which layers were asked for, and what the user says of it
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Column(
        "executed", Integer, nullable=False
    ),  # the newest request that has a result, as have all before it; -1: none
    Column("dropped", Integer, nullable=False),  # requests up to this one can't be done again; -1: all can
    Index("models_of_tenant", "tenant", "created_at"),
)

requests = Table(
    "requests",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("target", String, nullable=False),  # a model, or a sampler
    Column("seq_id", Integer, nullable=False),
    Column("digest", String, nullable=False),  # of the body, to recognise a request that was sent again
    Column("body", LargeBinary),  # NULL: no longer needed
    Column("sequences", Integer, nullable=False, server_default="0"),  # that are to be sampled
    Column("state", String, nullable=False),
    Column("result", LargeBinary),  # NULL: there is none yet, or not any more
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("completed", Integer),  # of a request for samples, its place among all of its sampler that have a result
    Index("requests_completed", "target", "completed"),
    Index("requests_in_order", "target", "seq_id", unique=True),
    Index("requests_of_tenant", "tenant", "state", "ended_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String, primary_key=True),  # tinker://MODEL/weights/NAME
    Column("tenant", String, nullable=False),  # "": everybody's
    Column("model_id", String, nullable=False),
    Column("name", String, nullable=False),  # weights/NAME
    Column("folder", FOLDER, nullable=False),
    Column("base", String, nullable=False),
    Column("adapter", ADAPTER, nullable=False),
    Column("data", JSON, nullable=False),  # as of the model
    Column("step", Integer, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("user_metadata", JSON),
    Column("public", Boolean, nullable=False, server_default=sa.false()),  # whether all tenants may use it
    Index("checkpoints_of_tenant", "tenant", "created_at"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base", String, nullable=False),
    Column("model_path", String),  # NULL: of the base model, or of weights without a name
    Column("folder", FOLDER),  # of an adapter; NULL: the base model
    Column("is_private", Boolean, nullable=False),  # whether the folder is this sampler's alone, and ends with it
    Column("created_at", Float, nullable=False),
    Column("clones", Integer, nullable=False, server_default="0"),  # clients that have joined the first one
    Index("samplers_of_session", "session_id"),
)

PENDING, DONE, FAILED, FORGOTTEN = "pending", "done", "failed", "forgotten"


def row_of(record: Any) -> dict[str, Any]:
    """Return a record's fields, which columns of its table have as names."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


def stored_record(kind: type[R], row: sa.Row[Any]) -> R:
    """Return the record of a row; fields without a column are None."""
    return kind(**{one.name: row._mapping.get(one.name) for one in fields(kind)})  # type: ignore[arg-type]


def execute(connection: sa.Connection, statement: sa.Executable) -> None:
    """Execute a statement without results."""
    connection.execute(statement)


SCHEMA = Schema(store="journal of a Tinker server", metadata=metadata)


def open_journal(path: Path) -> Database:
    """Open or create a server's database. Commits survive a kill and a loss of power."""
    with writing(path):
        private_folder(path.parent)
        make_private(path)
    backend = Backend(
        engine=open_engine(path, "FULL"),
        read_engine=open_engine(path, "FULL", read_only=True),
        readers=1,
        explain=partial(_explain, path),
    )
    return Database(backend, SCHEMA)


def _explain(path: Path, error: Exception) -> Exception:
    """Return a StoreError for an error of the file or the disk; a defect of Palestra as it is."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    if not isinstance(cause, sqlite3.DatabaseError) or isinstance(cause, sqlite3.IntegrityError):
        return error
    found = StoreError(f"the journal {path} can't be used: {cause}")
    found.__cause__ = cause
    return found
