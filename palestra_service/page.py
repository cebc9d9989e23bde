"""The page of a control plane: jobs of a tenant, and their runs for authorized users."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection

from fastapi import FastAPI
from starlette.requests import Request

from palestra.dashboard.files import public_paths
from palestra.dashboard.runs import Run
from palestra.errors import NotFound, Unauthorized
from palestra.types.jobs import JobRecord
from palestra.types.states import JobState
from palestra_service.api import PUBLIC, ControlPlane, create_control_app
from palestra_service.jobs.launcher import RUN
from palestra_service.page_routes import MOST_FOLLOWED, add_service_page
from palestra_service.rights.permissions import Action


def create_service_app(plane: ControlPlane, stopping: asyncio.Event) -> FastAPI:
    """Return the application of a control plane with its page."""
    app = create_control_app(plane, public={*PUBLIC, "/", *public_paths()})
    add_service_page(app, _TenantJobs(plane), stopping)
    return app


class _TenantJobs:
    """The jobs that the key of a request may read; see `JobAccess`."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.any_key = plane.may(Action.SELF_READ)
        self.listing = plane.may(Action.JOB_LIST)
        self.reading = plane.may(Action.JOB_READ)

    async def run(self, request: Request, job_id: str) -> Run:
        """Return the run of a job; see `JobAccess`."""
        by = await self._plane.who(request)
        job = await self._plane.job(by, job_id, Action.JOB_READ)
        run = self._run_of(job)
        if not await asyncio.to_thread((run.folder / "run.db").exists):
            raise NotFound(f"job {job_id} is {job.state}, and has not begun to write its run")
        return run

    async def running(self, request: Request) -> list[Run]:
        """Return the runs of the newest running jobs; see `JobAccess`."""
        by = await self._plane.who(request)
        page = await self._plane.store.jobs(
            by.tenant,
            states=(JobState.RUNNING,),
            limit=MOST_FOLLOWED,
            viewer=None if by.sees(None) else by.user,
        )
        return [self._run_of(job) for job in page.jobs]

    async def check(self, request: Request, job_ids: Collection[str]) -> None:
        """Check a key that has opened a stream; see `JobAccess`."""
        by = await self._plane.identities.renewed(await self._plane.who(request))
        if by is None:
            raise Unauthorized("the key of this stream was revoked, or has expired")
        for job_id in job_ids:
            await self._plane.job(by, job_id, Action.JOB_READ)

    async def tenant(self, request: Request) -> str:
        """Return the tenant of a request."""
        return (await self._plane.who(request)).tenant

    def _run_of(self, job: JobRecord) -> Run:
        scheduler, trains = self._plane.scheduler, job.kind == "training"
        return Run(
            name=job.job_id,
            folder=scheduler.folder_of(job.job_id) / RUN,
            title=job.name,
            serve=shlex.join(["palestra", "submit", "--from-job", job.job_id]) if trains else "",
            used=lambda: job.job_id in scheduler.running,
        )
