"""The page of a service: the runs of a tenant's jobs, for authorized users.

The control plane's routes provide the rest of the page's data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from palestra import __version__
from palestra.dashboard.answers import RunsAnswer
from palestra.dashboard.files import PAGE, add_files
from palestra.dashboard.reader import Reader
from palestra.dashboard.routes import SESSION, ViewerKey, add_run_routes, read_positions
from palestra.dashboard.runs import Run
from palestra.dashboard.streams import Streams
from palestra.errors import InvalidRequest
from palestra.http.guard import bearer

MOST_RUNS = 1000  # that are known at the same time; each keeps a few kilobytes
MOST_FOLLOWED = 50  # runs of one stream
AFTER = "`JOB:NUMBER` for each job whose events are wanted."


class JobAccess(Protocol):
    """Authorizes access to jobs and provides their runs; the routes know neither keys nor tenants.

    Attributes:
        any_key: route dependency that any valid key passes.
        listing: dependency of a route that lists jobs.
        reading: dependency of a route that reads the job of the path parameter `run`.
    """

    any_key: Callable[..., Any]
    listing: Callable[..., Any]
    reading: Callable[..., Any]

    async def run(self, request: Request, job_id: str) -> Run:
        """Return the run of a job.

        Raises:
            NotFound: the job is not visible, or has no run yet.
            Forbidden: the key may not read jobs.
        """
        ...

    async def running(self, request: Request) -> Sequence[Run]:
        """Return the runs of visible running jobs, newest first."""
        ...

    async def check(self, request: Request, job_ids: Collection[str]) -> None:
        """Check that a continuing request's key still gives access to some jobs.

        Raises:
            PalestraError: it does not.
        """
        ...

    async def tenant(self, request: Request) -> str:
        """Return the tenant of a request."""
        ...


def add_service_page(app: FastAPI, jobs: JobAccess, stopping: asyncio.Event) -> None:
    """Add the page, and the runs of jobs, to an application with public `/` and `public_paths`.

    Args:
        stopping: set when the server ends, to end streams.
    """
    reader = Reader((), stopping, MOST_RUNS)

    def private(response: Response) -> None:
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"

    async def readable(run: str, request: Request, response: Response) -> None:
        await jobs.reading(request)
        private(response)
        reader.add(await jobs.run(request, run))

    readable.action = jobs.reading.action  # type: ignore[attr-defined]  # for the test that goes through all routes

    add_files(app)

    @app.get("/", include_in_schema=False)
    async def page() -> RedirectResponse:
        """Lead to the page."""
        return RedirectResponse(PAGE)

    @app.post(SESSION, tags=["page"], dependencies=[Depends(jobs.any_key)])
    async def session(request: Request, response: Response) -> ViewerKey:
        """Return the key of the request, if it is good, and that this is a service."""
        private(response)
        return ViewerKey(key=bearer(request) or "", talk=None, service=True)

    @app.get(f"{PAGE}/api/runs", tags=["page"], dependencies=[Depends(jobs.listing)])
    async def runs(request: Request, response: Response) -> RunsAnswer:
        """List the progress of the tenant's running jobs: the newest 50 visible ones."""
        private(response)
        found = await jobs.running(request)
        for run in found:
            reader.add(run)
        return RunsAnswer(runs=await reader.described_each(found), version=__version__)

    add_run_routes(app, reader, readable)
    _add_stream(app, jobs, reader, stopping)


def _add_stream(app: FastAPI, jobs: JobAccess, reader: Reader, stopping: asyncio.Event) -> None:
    """Add the route that streams jobs' reports."""
    streams = Streams(reader, stopping)

    @app.get(f"{PAGE}/api/events", tags=["page"], dependencies=[Depends(jobs.listing)])
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
        return streams.answer(stream, stream.follow(follow), await jobs.tenant(request))
