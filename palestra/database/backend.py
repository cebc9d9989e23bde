"""The differences between SQLite and PostgreSQL, as a `Database` sees them, and the version of its tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from palestra.errors import StoreError

Explain = Callable[[Exception], Exception]
Problem = Callable[[], StoreError | None]
Fence = Callable[[sa.Connection], None]
Transaction = Callable[[sa.Connection], AbstractContextManager[object]]


def no_problem() -> StoreError | None:
    """Return None: by default, a commit is always acknowledged."""
    return None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Connections to one database, and functions that differ between SQLite and PostgreSQL.

    Attributes:
        engine: creates the one writing connection.
        explain: maps an error of the database, or of decoding a row, to the caller's error: a StoreError if the
            database is the cause, else the same error.
        watch: called once the tables exist; returns a function that is called after each commit, before its
            acknowledgement. A StoreError that this function returns replaces the acknowledgement.
        fence: called in the transaction that opens the database; returns a function that every later transaction calls
            first, or None. If it raises Superseded, nothing is written any more.
        bounded: whether it may fail to answer: callers try again, and wait at most `LONGEST_REPLY_SECONDS`.
        transaction: commits what a block changes on a connection, or rolls it back if the block raises an error.
        release: releases the lock on the database after all connections are closed.
    """

    engine: sa.Engine
    read_engine: sa.Engine
    readers: int
    explain: Explain
    watch: Callable[[], Problem] = lambda: no_problem
    fence: Callable[[sa.Connection], Fence | None] = lambda _: None
    bounded: bool = False
    transaction: Transaction = sa.Connection.begin
    release: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close all connections, and release the lock for other processes."""
        self.read_engine.dispose()
        self.engine.dispose()
        self.release()


def _read_pragma(connection: sa.Connection) -> int:
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def _write_pragma(connection: sa.Connection, version: int) -> None:
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tables of a store.

    Attributes:
        read_version: returns the database's recorded version; 0: it is empty. Raises StoreError if it belongs to
            another program. Default: SQLite's `user_version`.
        write_version: records the version in the database.
    """

    store: str
    metadata: sa.MetaData
    read_version: Callable[[sa.Connection], int] = _read_pragma
    write_version: Callable[[sa.Connection, int], None] = _write_pragma

    @property
    def version(self) -> int:
        """Return a digest of the tables, positive and below 2^31, because SQLite stores a signed 32-bit number."""
        return _digest(self.metadata)

    def create(self, connection: sa.Connection) -> None:
        """Create the tables in an empty database, in the caller's transaction; keep a database of this version."""
        found = self.read_version(connection)
        if found == 0:
            self.metadata.create_all(connection)
            self.write_version(connection, self.version)
        else:
            self.check(found)

    def check(self, found: int, path: object = "") -> None:
        """Raise StoreError for a database of another version of Palestra."""
        if found != self.version:
            where = f"{path}: " if path else ""
            raise StoreError(
                f"{where}this {self.store} is of another version of Palestra (tables {found:08x}; this version has "
                f"{self.version:08x}); open it with the version that wrote it, or begin a new one"
            )


@cache
def _digest(metadata: sa.MetaData) -> int:
    dialect, parts = sqlite.dialect(), []
    for table in metadata.sorted_tables:
        parts.append(str(CreateTable(table).compile(dialect=dialect)))
        parts += sorted(str(CreateIndex(index).compile(dialect=dialect)) for index in table.indexes)
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:4]) >> 1 or 1
