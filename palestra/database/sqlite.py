"""SQLite files: engines and prepared statements for them, and whether a path still names the open file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from palestra.disk import GO_ON, open_own
from palestra.errors import StoreError

# KiB of pages that a connection caches. A run's file grows with every call, and pages that were read stay until the
# cache is full, so a long run holds this much memory; further pages come from the operating system's cache.
WRITER_CACHE, READER_CACHE = 4096, 2048
MOST_JOURNAL = 2**24  # bytes to which the write-ahead log is cut when it was emptied
BEGIN = "BEGIN IMMEDIATE"
OLDEST = (3, 35)  # the first SQLite with RETURNING
MOST_VALUES = 500  # bound values of one statement, which SQLite limits

T = TypeVar("T")
_DIALECT = sqlite.dialect()
_namedtuple = cast(Any, namedtuple)  # the columns are not known to a type checker


def pieces(items: Sequence[T], most: int = MOST_VALUES) -> Iterator[Sequence[T]]:
    """Return items in pieces, each of which one statement can have."""
    return (items[start : start + most] for start in range(0, len(items), most))


def open_engine(
    path: Path, synchronous: str, read_only: bool = False, pool: type[sa.Pool] = sa.pool.StaticPool
) -> sa.Engine:
    """Return an engine with one connection to a SQLite file in WAL mode, opened at first use.

    With `synchronous=NORMAL` a commit survives the death of the process (kill -9); with `FULL` also a power failure.

    Args:
        path: created if missing, unless `read_only`.
        synchronous: `NORMAL` or `FULL`; not used by read-only connections.
        read_only: transactions begin with BEGIN instead of BEGIN IMMEDIATE, which keeps a write from failing because
            another process wrote after the transaction's first read.
        pool: for more than one connection.

    Raises:
        StoreError: the SQLite of this Python is too old.
    """
    if sqlite3.sqlite_version_info < OLDEST:
        raise StoreError(
            f"this Python has SQLite {sqlite3.sqlite_version}, and Palestra needs {'.'.join(map(str, OLDEST))} or "
            "newer; use another Python, such as one that uv or conda installs"
        )
    target = path.absolute().as_uri() + ("?mode=ro" if read_only else "?mode=rwc")  # any character may be in a path
    engine = sa.create_engine(
        "sqlite+pysqlite://",
        creator=lambda: sqlite3.connect(target, uri=True, check_same_thread=False),
        poolclass=pool,
    )

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        if not read_only:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA journal_size_limit={MOST_JOURNAL}")
            connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA busy_timeout=10000")
        connection.execute(f"PRAGMA cache_size=-{READER_CACHE if read_only else WRITER_CACHE}")

    begin = "BEGIN" if read_only else BEGIN

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # Given to the driver, because SQLAlchemy takes longer to pass the statement on than SQLite to execute it.
        if (driver := sqlite_connection(connection)).in_transaction:  # see `transaction`
            return
        try:
            driver.execute(begin)
        except sqlite3.Error as error:
            raise as_sqlalchemys(error, begin) from error

    return engine


@contextlib.contextmanager
def transaction(connection: sa.Connection) -> Iterator[None]:
    """Commit what the block changes, or roll it back if the block raises an error.

    SQLAlchemy takes part only if a statement of the block is its own: else SQLite begins and commits alone, which takes
    two thirds of the time.
    """
    driver = sqlite_connection(connection)
    try:
        driver.execute(BEGIN)
        yield
        (connection if connection.in_transaction() else driver).commit()
    except BaseException:
        connection.rollback()  # also after a COMMIT that failed, when SQLAlchemy holds a transaction that is inactive
        driver.rollback()
        raise


def sqlite_connection(connection: sa.Connection) -> sqlite3.Connection:
    """Return SQLite's own connection, for frequent statements."""
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def as_sqlalchemys(error: sqlite3.Error, statement: str) -> sa.exc.DBAPIError:
    """Return SQLAlchemy's error for one of SQLite, so that callers handle one kind of errors."""
    kind: type[sa.exc.DBAPIError] = getattr(sa.exc, type(error).__name__, sa.exc.DatabaseError)
    return kind(statement, None, error)


def make_private(path: Path) -> None:
    """Create the file if necessary, and make it readable only by its owner, as `-wal` and `-shm` then are too."""
    for suffix in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_own(path.with_name(path.name + suffix), os.O_RDONLY))
    descriptor = open_own(path, os.O_CREAT | os.O_RDWR)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


class OpenFile:
    """Detects that a path no longer names the opened file.

    SQLite does not check the path again, so a process could write forever into a deleted file. The inode is not reused
    meanwhile, because the file is open.
    """

    def __init__(self, path: Path) -> None:
        """Store the inodes of `path` and its write-ahead log, which must be open."""
        # Text: it is looked at after each commit, and a Path takes three times as long.
        found = {name: os.stat(name) for name in (str(path), f"{path}-wal") if os.path.exists(name)}
        self._known = {name: (status.st_dev, status.st_ino) for name, status in found.items()}

    def problem(self) -> StoreError | None:
        """Return an error if the path no longer names the opened file."""
        for name, known in self._known.items():
            try:
                found = os.stat(name)
            except OSError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != known:
                return StoreError(
                    f"{name} was deleted, moved or replaced while the job was running, so nothing more is "
                    f"acknowledged; put it back from a copy and {GO_ON}, or start a new run"
                )
        return None


class Prepared:
    """A compiled statement whose values need no conversion for SQLite: text, numbers, bytes and None."""

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        """Compile a statement. The values of its `bindparam`s are given by name at execution."""
        compiled = statement.compile(dialect=_DIALECT)
        self._sql, self._names = str(compiled), tuple(compiled.positiontup or ())
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}
        columns = statement.exported_columns.keys()  # those that a select reads or RETURNING gives back
        self._row: Callable[[tuple[Any, ...]], Any] = _namedtuple("Row", columns, rename=True)._make

    def change(self, connection: sa.Connection, values: Mapping[str, Any]) -> int:
        """Execute an insert or update, and return the number of changed rows."""
        try:
            given = list(map({**self._fixed, **values}.__getitem__, self._names))
            return sqlite_connection(connection).execute(self._sql, given).rowcount
        except sqlite3.Error as error:
            raise as_sqlalchemys(error, self._sql) from error

    def change_many(self, connection: sa.Connection, values: Iterable[Mapping[str, Any]]) -> None:
        """Execute an insert or update once for each of some values."""
        try:
            sqlite_connection(connection).executemany(self._sql, map(self._given, values))
        except sqlite3.Error as error:
            raise as_sqlalchemys(error, self._sql) from error

    def rows(self, connection: sa.Connection, values: Mapping[str, Any]) -> list[Any]:
        """Execute a select, and return its rows with columns as attributes, as in SQLAlchemy."""
        return [self._row(found) for found in self._execute(connection, values, sqlite3.Cursor.fetchall)]

    def row(self, connection: sa.Connection, values: Mapping[str, Any]) -> Any:
        """Execute a select, or a change with RETURNING, and return its first row or None."""
        found = self._execute(connection, values, sqlite3.Cursor.fetchone)
        return None if found is None else self._row(found)

    def _execute(self, connection: sa.Connection, values: Mapping[str, Any], take: Callable[[sqlite3.Cursor], T]) -> T:
        """Execute the statement and return the result of `take` for its cursor."""
        try:
            return take(sqlite_connection(connection).execute(self._sql, self._given(values)))
        except sqlite3.Error as error:
            raise as_sqlalchemys(error, self._sql) from error

    def _given(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the values of the statement in its order."""
        return list(map({**self._fixed, **values}.__getitem__, self._names))
