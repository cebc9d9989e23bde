"""The control store's database, chosen by URL, and the lock that lets only one process write it.

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from palestra.database import Backend
from palestra.database.backend import Fence
from palestra.database.sqlite import make_private, open_engine
from palestra.disk import check_folder, open_own
from palestra.errors import ConfigError, StoreError, StoreUnreachable, Superseded
from palestra_service.store.database_errors import drop_connections, in_words
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
    """Open a SQLite file that only its owner can read, and lock it."""
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
    """Lock a file, and return a function that unlocks it."""
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
    """Describe process id and host, so that an operator finds the lock's holder."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_use(holder: str) -> str:
    """Return the message for a store that another scheduler has locked."""
    return (
        f"this control store is in use by another scheduler ({holder or 'unknown'}); stop it first, or give this one "
        "another --database"
    )
