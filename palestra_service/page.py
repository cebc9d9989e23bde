"""The page of a control plane: jobs of a tenant, and their runs for authorized users.

The control plane's routes provide the rest of the page's data.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, FastAPI, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from palestra import __version__
from palestra.dashboard.answers import RunsAnswer
from palestra.dashboard.files import PAGE, add_files, public_paths
from palestra.dashboard.reader import Reader
from palestra.dashboard.routes import SESSION, SessionAnswer, add_run_routes, read_positions
from palestra.dashboard.runs import Run
from palestra.dashboard.streams import Streams
from palestra.errors import InvalidRequest, NotFound, Unauthorized
from palestra.http.guard import bearer
from palestra.types.states import JobState
from palestra_control.jobs import JobRecord
from palestra_service.api import PUBLIC, ControlPlane, create_control_app
from palestra_service.jobs.launcher import RUN

MOST_RUNS = 1000  # that are known at the same time; each keeps a few kilobytes
MOST_FOLLOWED = 50  # runs of one stream
AFTER = "`JOB:NUMBER` for each job whose events are wanted."


def create_service_app(plane: ControlPlane, stopping: asyncio.Event) -> FastAPI:
    """Return the application of a control plane with its page."""
    app, jobs = create_control_app(plane, public={*PUBLIC, "/", *public_paths()}), TenantJobs(plane)
    reader = Reader((), stopping, MOST_RUNS)

    def private(response: Response) -> None:
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"

    async def member(run: str, request: Request, response: Response) -> None:
        private(response)
        reader.add(await jobs.run(request, run))

    add_files(app)

    @app.get("/", include_in_schema=False)
    async def page() -> RedirectResponse:
        """Lead to the page."""
        return RedirectResponse(PAGE)

    @app.post(SESSION, tags=["page"], dependencies=[Depends(plane.member)])
    async def session(request: Request, response: Response) -> SessionAnswer:
        """Return the key of the request, if it is good, and that this is a service."""
        private(response)
        return SessionAnswer(key=bearer(request) or "", talk=None, service=True)

    @app.get(f"{PAGE}/api/runs", tags=["page"], dependencies=[Depends(plane.member)])
    async def runs(request: Request, response: Response) -> RunsAnswer:
        """List the progress of the tenant's running jobs: the newest 50 visible ones."""
        private(response)
        found = await jobs.running(request)
        for run in found:
            reader.add(run)
        return RunsAnswer(runs=await reader.described_each(found), version=__version__)

    add_run_routes(app, reader, member)
    streams = Streams(reader, stopping)

    @app.get(f"{PAGE}/api/events", tags=["page"], dependencies=[Depends(plane.member)])
    async def events(
        request: Request,
        after: Annotated[list[str], Query(description=AFTER, max_length=MOST_FOLLOWED)],
        follow: bool = True,
    ) -> StreamingResponse:
        """Stream server-sent events of jobs' runs: those after some numbers, then new ones until all are over.

        The data of each has its job's id as `run`, its `event_id`, `at`, `kind`, and `data`.
        """
        positions = read_positions(after)
        if not positions:
            raise InvalidRequest("after names no job; send JOB:NUMBER for each", "after")
        for job_id in positions:
            reader.add(await jobs.run(request, job_id))

        async def check() -> None:
            await jobs.check(request, positions)

        stream = streams.stream(positions, check)
        return streams.answer(stream, stream.follow(follow), (await plane.who(request)).tenant)

    return app


class TenantJobs:
    """The jobs that the key of a request may read, and their runs."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def run(self, request: Request, job_id: str) -> Run:
        """Return a job's run. Raises NotFound if it is not visible or has none yet; Forbidden if the key may not."""
        by = await self._plane.who(request)
        job = await self._plane.job(by, job_id)
        run = self._run_of(job)
        if not await asyncio.to_thread((run.folder / "run.db").exists):
            raise NotFound(f"job {job_id} is {job.state}, and has not begun to write its run")
        return run

    async def running(self, request: Request) -> list[Run]:
        """Return the runs of visible running jobs, newest first."""
        by = await self._plane.who(request)
        page = await self._plane.store.jobs(
            by.tenant,
            states=(JobState.RUNNING,),
            limit=MOST_FOLLOWED,
        )
        return [self._run_of(job) for job in page.jobs]

    async def check(self, request: Request, job_ids: Collection[str]) -> None:
        """Check that a continuing request's key still gives access to some jobs. Raises PalestraError if not."""
        by = await self._plane.identities.renewed(await self._plane.who(request))
        if by is None:
            raise Unauthorized("the key of this stream was revoked, or has expired")
        for job_id in job_ids:
            await self._plane.job(by, job_id)

    def _run_of(self, job: JobRecord) -> Run:
        scheduler, trains = self._plane.scheduler, job.kind == "training"
        return Run(
            name=job.job_id,
            folder=scheduler.folder_of(job.job_id) / RUN,
            title=job.name,
            serve=shlex.join(["palestra", "submit", "--from-job", job.job_id]) if trains else "",
            used=lambda: job.job_id in scheduler.running,
        )
