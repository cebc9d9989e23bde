"""The control store's database, chosen by URL, its lock for one writing process, and what its errors mean.

SQLite: a lock on a file next to the database, which the operating system frees when the process dies. PostgreSQL: an
advisory lock of the writing session. When that session ends for any reason, the lock and the transaction end with it,
and a new session must get the lock before it can write.

A process that gets the lock increments the epoch, a row of the store, and each of its transactions first checks that
the epoch is still its own. So a process that has lost the lock to another one never writes again, however clocks and
networks behave.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from palestra.database import Backend
from palestra.database.backend import Fence
from palestra.database.sqlite import make_private, open_engine
from palestra.disk import check_folder, open_own
from palestra.errors import ConfigError, StoreError, StoreUnreachable, Superseded
from palestra_service.store.tables import EPOCH_KEY, meta

LOCK_SECONDS = 3.0  # how long a scheduler that was just killed may take to lose its lock
LOCK_NUMBER = 0x70616C6573747261  # of the advisory lock: "palestra" in ASCII
APPLICATION = "palestra scheduler"
POSTGRES_READERS = 4
_TAKEN_OVER = "another scheduler has taken over the control store and its jobs, so this one ends"
# A connection whose other end is gone is noticed after about 30 s, by client and by server.
POSTGRES_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
    "options": "-c synchronous_commit=on -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 "
    "-c tcp_keepalives_count=4 -c tcp_user_timeout=30000 "
    "-c lock_timeout=5s -c statement_timeout=10s -c idle_in_transaction_session_timeout=60s",
}


def open_backend(url: str) -> Backend:
    """Open the database of a URL, and take the lock of a SQLite file.

    A PostgreSQL database's lock is taken by the writing connection.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        parsed = sa.URL.create("unknown")
    kind = parsed.get_backend_name() if parsed.drivername != "unknown" else "unknown"
    if kind == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return _open_sqlite(Path(str(parsed.database)))
    if kind in ("postgresql", "postgres"):
        return _open_postgres(parsed.set(drivername="postgresql+psycopg"))
    raise ConfigError("the database has to be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE")


def _open_sqlite(path: Path) -> Backend:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(path.parent, may_be_sticky=True)
        make_private(path)
        release = _lock_file(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise ConfigError(f"the control store {path} can't be opened: {error.strerror}") from error
    try:
        engine, reader = open_engine(path, "FULL"), open_engine(path, "FULL", read_only=True)
    except BaseException:
        release()
        raise
    return Backend(
        engine=engine,
        read_engine=reader,
        readers=1,
        explain=in_words,
        fence=_begin_epoch,
        bounded=True,
        release=release,
    )


def _begin_epoch(connection: sa.Connection) -> Fence:
    """Begin an epoch, and return a check that no other process has begun another one."""
    wanted = sa.select(meta.c.value).where(meta.c.key == EPOCH_KEY)
    epoch = str(int(connection.execute(wanted).scalar() or 0) + 1)
    connection.execute(meta.delete().where(meta.c.key == EPOCH_KEY))
    connection.execute(meta.insert(), {"key": EPOCH_KEY, "value": epoch})
    locked = wanted.with_for_update(read=True)  # who begins the next epoch waits for this transaction

    def check(connection: sa.Connection) -> None:
        if connection.execute(locked).scalar() != epoch:
            raise Superseded(_TAKEN_OVER)

    return check


def _lock_file(path: Path) -> Callable[[], None]:
    descriptor = open_own(path, os.O_CREAT | os.O_RDWR)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise StoreError(_in_use(holder)) from None
            time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _this_process().encode(), 0)
    return lambda: os.close(descriptor)


def _open_postgres(url: sa.URL) -> Backend:
    """Return connections to a PostgreSQL database; every new writing session takes the lock."""
    options = POSTGRES_OPTIONS | {"application_name": f"{APPLICATION}, {_this_process()}"[:63]}
    try:
        engine = sa.create_engine(url, connect_args=options, pool_size=1, max_overflow=0, hide_parameters=True)
        reader = sa.create_engine(
            url,
            connect_args=options,
            pool_size=POSTGRES_READERS,
            max_overflow=0,
            pool_pre_ping=True,
            isolation_level="REPEATABLE READ",  # so that all queries of one read see the same state
            execution_options={"postgresql_readonly": True},
            hide_parameters=True,
        )
    except ModuleNotFoundError as error:
        raise ConfigError("PostgreSQL needs psycopg: install palestra[postgres]") from error

    own: set[int] = set()

    @sa.event.listens_for(engine, "connect")
    def _lock(connection: Any, _record: Any) -> None:
        _lock_session(connection, own)

    drop_connections(engine)
    drop_connections(reader)
    return Backend(
        engine=engine,
        read_engine=reader,
        readers=POSTGRES_READERS,
        explain=in_words,
        fence=_begin_epoch,
        bounded=True,
    )


def _lock_session(connection: Any, own: set[int]) -> None:
    """Take the lock for a new session. If another session holds it, the new one is closed."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        taken = connection.execute("SELECT pg_try_advisory_lock(%s)", (LOCK_NUMBER,)).fetchone()[0]
        connection.commit()  # the lock is the session's, not the transaction's
        if taken:
            own.add(connection.info.backend_pid)
            return
        if time.monotonic() > deadline:
            found = connection.execute(
                "SELECT a.pid, a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
                "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s AND l.objid = %s AND l.database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())",
                (LOCK_NUMBER >> 32, LOCK_NUMBER & 0xFFFFFFFF),
            ).fetchone()
            connection.close()
            pid, name = found or (None, "")
            if pid in own:
                raise StoreUnreachable("the database still waits for a session of this scheduler that was cut off")
            holder = name.removeprefix(f"{APPLICATION}, ")
            raise Superseded(f"{_TAKEN_OVER} ({holder or 'unknown'})") if own else StoreError(_in_use(holder))
        time.sleep(0.05)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_use(holder: str) -> str:
    return (
        f"this control store is in use by another scheduler ({holder or 'unknown'}); stop it first, or give this one "
        "another --database"
    )


class Follows(Enum):
    """How to handle a database error.

    Attributes:
        AGAIN: StoreUnreachable; retry on the same connection.
        RECONNECT: StoreUnreachable; retry on a new connection.
        REFUSED: StoreError; an operator must act.
        DEFECT: raise the error itself, a defect of Palestra.
    """

    AGAIN = "again"
    RECONNECT = "reconnect"
    REFUSED = "refused"
    DEFECT = "defect"


# By class (the first two characters of SQLSTATE), and by whole code for what differs from its class. See appendix A of
# PostgreSQL's documentation.
_POSTGRES = {
    # Transactions that were rolled back, missing resources, locks, time limits, snapshots, I/O.
    Follows.AGAIN: "40 53 55 57014 58 72",
    # Lost and idle connections, a server that ends or starts, a pooler that has exchanged the session, a password that
    # is being changed, and a primary that is read-only now: a new connection may lead to the new one.
    Follows.RECONNECT: "08 25006 25P03 25P04 26 28 3D 40003 42P05 57",
    # Missing rights, tables and files, triggers of others, damage, and programs that only speak PostgreSQL's protocol.
    Follows.REFUSED: "0A 0L 0P 3F 42501 42P01 58P01 58P02 F0 P0 XX",
    Follows.DEFECT: "00 01 02 03 09 0B 0F 0Z 10 20 21 22 23 24 25 27 2B 2D 2F 34 38 39 3B 42 44 54 HV",
}
POSTGRES = {state: follows for follows, states in _POSTGRES.items() for state in states.split()}

# By primary result code. All others are REFUSED: a damaged file, a missing right, a table that somebody has dropped.
_SQLITE = {
    Follows.AGAIN: "BUSY LOCKED NOMEM READONLY INTERRUPT IOERR FULL CANTOPEN PROTOCOL",
    Follows.DEFECT: "CONSTRAINT MISMATCH MISUSE RANGE",
}
SQLITE = {getattr(sqlite3, f"SQLITE_{name}"): follows for follows, names in _SQLITE.items() for name in names.split()}


def what_follows(error: BaseException | None) -> Follows:
    """Return how to handle an error of psycopg or `sqlite3`."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # raised by Python's module, which has not asked SQLite
            return Follows.DEFECT if isinstance(error, sqlite3.ProgrammingError) else Follows.REFUSED
        return SQLITE.get(code & 0xFF, Follows.REFUSED)
    state: str | None = getattr(error, "sqlstate", None)
    if state is None:  # raised by the client: there is no connection, or a value can't be sent
        return Follows.RECONNECT if _is_connection_error(error) else Follows.DEFECT
    return POSTGRES.get(state, POSTGRES.get(state[:2], Follows.REFUSED))


def in_words(error: Exception) -> Exception:
    """Return the callers' error for a database error: its message without the statement and its values.

    Defects of Palestra, such as a violated constraint, are returned unchanged.
    """
    if not isinstance(error, sa.exc.DBAPIError):
        return error
    said, follows = " ".join(str(error.orig).split()), what_follows(error.orig)
    if follows is Follows.DEFECT:
        return error
    if follows is Follows.REFUSED:
        return StoreError(f"the control store could not be used: {said}")
    return StoreUnreachable(f"the control store can't be used at the moment: {said}")


def drop_connections(engine: sa.Engine) -> None:
    """Make a PostgreSQL engine close a connection after an error with RECONNECT."""

    @sa.event.listens_for(engine, "handle_error")
    def _handle(context: sa.engine.ExceptionContext) -> None:
        if what_follows(context.original_exception) is Follows.RECONNECT:
            context.is_disconnect = True


def _is_connection_error(error: BaseException | None) -> bool:
    return any(kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__)
