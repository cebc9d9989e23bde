"""Jobs and identities for tests."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import APIRoute

from palestra.types.states import JobState
from palestra_control.jobs import JobRecord, JobRequest, Resources
from palestra_service.accounts.administration import Administration
from palestra_service.accounts.identity import Identities, Identity
from palestra_service.api import ControlPlane
from palestra_service.jobs.launcher import Launcher
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.rights import KeyLimits, RequestRates, Role
from palestra_service.store.control_store import ControlStore
from palestra_service.store.tables import changes
from unit.control.launching import FakeLauncher

REQUEST = JobRequest(name="addition", config={"steps": 3}, resources=Resources(cpus=1.0))


def ask(**values: Any) -> JobRequest:
    return dataclasses.replace(REQUEST, **values)


async def submit(store: ControlStore, tenant: str = "a", user: str = "ann", **values: Any) -> JobRecord:
    return await store.submit_job(tenant, user, ask(**values))


async def running(store: ControlStore, tenant: str = "a", user: str = "ann") -> JobRecord:
    job = await submit(store, tenant, user)
    await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "there is room")
    return await store.change_state(job.job_id, JobState.STARTING, JobState.RUNNING, "it answers", url="http://n:1")


async def change_numbers(store: ControlStore, tenant: str = "a") -> list[int]:
    """Of all changes in a tenant, in order."""
    wanted = sa.select(changes.c.number).where(changes.c.tenant == tenant).order_by(changes.c.number)
    return await store.read(lambda connection: list(connection.execute(wanted).scalars()))


def identity(role: Role = Role.ADMIN, **values: Any) -> Identity:
    known = {"tenant": "default", "user": "admin", "key_id": None, "limits": KeyLimits()}
    return Identity(role=role, **(known | values))


def control_plane(store: ControlStore, folder: Path, launcher: Launcher | None = None, **more: Any) -> ControlPlane:
    """What `palestra serve` has, with a launcher that starts nothing; nobody schedules yet."""
    identities = Identities(store)
    return ControlPlane(
        scheduler=JobScheduler(store, launcher or FakeLauncher(), folder / "jobs", PlacementPolicy()),
        store=store,
        identities=identities,
        administration=Administration(store, identities),
        rates=RequestRates(store.clock),
        **more,
    )


def api_routes(app: FastAPI) -> list[APIRoute]:
    """All routes of an application, with those of its routers, which `app.routes` has as one."""
    found: list[Any] = []
    for route in app.routes:
        router = getattr(route, "original_router", None)
        found += [route] if router is None else router.routes
    return [route for route in found if isinstance(route, APIRoute)]


def pg_ctl(server: Any, command: str) -> None:
    """Stop or restart PostgreSQL as if its machine had lost power."""
    subprocess.run(
        [str(server.bin_path / "pg_ctl"), "-D", str(server.pgdata), "-w", "-m", "immediate", command],
        user=server.system_user,
        cwd=server.pgdata,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def cut_sessions(postgres_url: str) -> int:
    """End the sessions of all schedulers, and return how many there were."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        return connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name LIKE 'palestra scheduler%' AND datname = current_database()"
        ).fetchone()[0]
