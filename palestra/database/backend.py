"""The differences between SQLite and PostgreSQL, as a `Database` sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import sqlalchemy as sa

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
