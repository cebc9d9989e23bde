"""The differences between SQLite and PostgreSQL, as a `Database` sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from palestra.errors import StoreError

Explain = Callable[[Exception], Exception]
Problem = Callable[[], StoreError | None]
Fence = Callable[[sa.Connection], None]


def no_problem() -> StoreError | None:
    """Return None: the default check after a commit finds no reason against acknowledging it."""
    return None


def no_fence(_connection: sa.Connection) -> None:
    """Let every transaction write."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Connections to one database, and functions that differ between SQLite and PostgreSQL.

    Attributes:
        engine: makes the one connection that writes.
        read_engine: makes the connections that only read.
        readers: how many connections may read at the same time.
        explain: turns an error of the database, or of decoding a row, into the error that callers get: a StoreError if
            the database is the cause, else the same error.
        watch: called once, when the tables exist. It returns a function that is called after each commit, and before
            the commit is acknowledged; a StoreError that this function returns is raised in place of the
            acknowledgement.
        fence: called once, in the transaction that opens the database. It returns a function that every later
            transaction calls first. Where that raises Superseded, nothing is written any more.
        bounded: whether callers stop waiting for an answer after `LONGEST_REPLY_SECONDS`. Else they wait for as long as
            a transaction takes.
        release: gives the lock on the database back, when all connections are closed.
    """

    engine: sa.Engine
    read_engine: sa.Engine
    readers: int
    explain: Explain
    watch: Callable[[], Problem] = lambda: no_problem
    fence: Callable[[sa.Connection], Fence] = lambda _: no_fence
    bounded: bool = False
    release: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close all connections, and release the lock so that another process may open the database."""
        self.read_engine.dispose()
        self.engine.dispose()
        self.release()
