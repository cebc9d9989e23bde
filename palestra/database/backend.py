"""What a `Database` needs to know of the kind of its database: SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from palestra.errors import StoreError

Explain = Callable[[Exception], Exception]
Problem = Callable[[], StoreError | None]


def no_problem() -> StoreError | None:
    """Return None: nothing keeps a commit from being acknowledged."""
    return None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Connections to one database, and what is particular to its kind.

    Attributes:
        engine: makes the one connection that writes.
        read_engine: makes the connections that only read.
        readers: how many connections may read at the same time.
        explain: turns what the database or the decoding of a row raised into the error that callers get: a StoreError
            where the database is the cause, else the error as it is.
        watch: called once, when the tables are there. What it returns is asked after each commit, before the commit is
            acknowledged, for a reason not to.
        release: gives the lock on the database back, when all connections are closed.
    """

    engine: sa.Engine
    read_engine: sa.Engine
    readers: int
    explain: Explain
    watch: Callable[[], Problem] = lambda: no_problem
    release: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Close all connections, and let another process have the database."""
        self.read_engine.dispose()
        self.engine.dispose()
        self.release()
