"""Routes for jobs: submit, list, cancel, and read their logs, events and files."""

# Annotations are not deferred here: FastAPI could not resolve those that name `plane`, a local of the function.

import asyncio
import os
import stat
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Query
from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse

from palestra.config import parse_config
from palestra.errors import InvalidRequest, NotFound
from palestra.http.app import request_schema
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, OpenStreams
from palestra.store.key_files import rotate_keys
from palestra.types.states import JobState
from palestra_control.jobs import JobKind, JobRecord, JobRequest
from palestra_control.wire import (
    ArtifactView,
    JobChange,
    JobKeyView,
    JobList,
    JobView,
    ServerView,
    SubmitJob,
)
from palestra_service.accounts.identity import Identity
from palestra_service.api import streams
from palestra_service.api.access import ControlPlane
from palestra_service.api.submission import allowed, check_recorded_source, request_of
from palestra_service.estimates import by_former_runs, same_work
from palestra_service.jobs.job_resources import body_of
from palestra_service.jobs.launcher import LOG_FILE, RUN

HIDDEN = ("secret", "api_key", ".lock")  # run.db is hidden, too: clients read it by the route for events


async def read_key(run: Path) -> str:
    """Return the key of a run's data plane."""
    try:
        return (await asyncio.to_thread((run / "api_key").read_text)).strip()
    except FileNotFoundError:
        raise NotFound("the job's data plane has no key yet") from None


def run_files(run: Path) -> list[ArtifactView]:
    """Return all downloadable files of a run, by path. Blocks for the disk."""
    found = []
    for folder, _, names in os.walk(run):
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(run)
            try:
                status = path.lstat()
            except FileNotFoundError:  # the job has replaced it meanwhile
                continue
            if stat.S_ISREG(status.st_mode) and _shown(name):
                found.append(ArtifactView(path=name.as_posix(), bytes=status.st_size, modified_at=status.st_mtime))
    return sorted(found, key=lambda artifact: artifact.path)


def run_file(run: Path, name: str) -> Path:
    """Return the path of a downloadable file; refuse paths that lead out of the run. Blocks for the disk."""
    missing = NotFound(f"the run has no file {name!r}")
    if "\0" in name or "\\" in name:
        raise missing
    root = run.resolve()
    try:
        path = (run / name).resolve()
        if path.is_relative_to(root) and _shown(path.relative_to(root)) and path.is_file():
            return path
    except OSError:  # no file can have this name
        pass
    raise missing


def _shown(name: Path) -> bool:
    return not any(part in HIDDEN or part.startswith((".", "run.db")) for part in name.parts)


FORMER = 100  # jobs among which those of the same configuration are looked for
MOST_STREAMS = 256  # of a user: more than the jobs that one may have open
REFUSED = "streams of this user are open, and there may not be more; close some"


def add_job_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes that submit, list and change jobs to the application."""
    store, scheduler = plane.store, plane.scheduler
    rotating = asyncio.Lock()  # a rotation that waits for another one holds no thread

    def view(job: JobRecord) -> JobView:
        if job.state is not JobState.QUEUED:
            return job_view(job, None)
        return job_view(job, scheduler.waiting.get(job.job_id), scheduler.places.get(job.job_id))

    @app.post("/jobs", tags=["jobs"], status_code=201, openapi_extra=request_schema(SubmitJob))
    async def submit(
        request: Request,
        by: Annotated[Identity, Depends(plane.member)],
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> JobView:
        """Submit a job. A job that could never start is refused, with the largest one that could."""
        body = await plane.body(SubmitJob, request)
        wanted = await request_of(plane, body, by)
        if reason := await scheduler.refusal(wanted.resources, by.tenant, wanted.adapters):
            raise InvalidRequest(f"this job could never start: it {reason}", "resources")
        job = await store.submit_job(by.tenant, by.user, wanted, idempotency_key, by.limits.open_jobs)
        await plane.log(by, "job.submit", job.job_id)
        return view(job).model_copy(update={"estimate": await _estimated(plane, by, job)})

    @app.get("/jobs", tags=["jobs"])
    async def listed(
        by: Annotated[Identity, Depends(plane.member)],
        state: Annotated[list[JobState] | None, Query()] = None,
        user: str | None = None,
        name: str | None = None,
        kind: JobKind | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobList:
        """Return the tenant's jobs, newest first, a page at a time."""
        page = await store.jobs(
            by.tenant,
            states=state or (),
            user=user,
            name=name,
            kind=kind,
            cursor=cursor,
            limit=limit,
        )
        return JobList(jobs=[view(job) for job in page.jobs], cursor=page.cursor)

    @app.get("/jobs/{job_id}", tags=["jobs"])
    async def one(job_id: str, by: Annotated[Identity, Depends(plane.member)]) -> JobView:
        """Return one job, with the reason for its state."""
        job = await plane.job(by, job_id)
        scheduler.seen(job_id)
        return view(job)

    @app.delete("/jobs/{job_id}", tags=["jobs"])
    async def cancel(job_id: str, by: Annotated[Identity, Depends(plane.member)]) -> JobView:
        """Cancel a job, which first saves its training. No effect on a job that has ended."""
        await plane.job(by, job_id, own=True)
        job = await scheduler.cancel(by.tenant, job_id, f"cancelled by {by.user}")
        await plane.log(by, "job.cancel", job_id)
        return view(job)

    @app.post("/jobs/{job_id}/resubmit", tags=["jobs"], status_code=201)
    async def resubmit(
        job_id: str,
        by: Annotated[Identity, Depends(plane.member)],
        idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
    ) -> JobView:
        """Submit a new job with the request of this one; it starts from the beginning."""
        job = await plane.job(by, job_id)
        config = await plane.pool.run(allowed, job.config, by, plane.rules)
        await check_recorded_source(plane, by, job.kind, config)  # it may read other episodes than the first job
        alike = {one.name: getattr(job, one.name) for one in fields(JobRequest) if hasattr(job, one.name)}
        limit = plane.rules.time_limit(job.time_limit_seconds)
        request = JobRequest(**alike | {"config": config, "time_limit_seconds": limit})
        again = await store.submit_job(by.tenant, by.user, request, idempotency_key, by.limits.open_jobs)
        await plane.log(by, "job.resubmit", again.job_id)
        return view(again)

    @app.post("/jobs/{job_id}/rotate-key", tags=["jobs"])
    async def rotate_key(job_id: str, by: Annotated[Identity, Depends(plane.member)]) -> JobKeyView:
        """Replace the key of a job's data plane.

        The old keys, of the job and of its episodes, become invalid.
        """
        job = await plane.job(by, job_id, own=True)
        run = scheduler.folder_of(job_id) / RUN
        async with rotating:
            key = await asyncio.to_thread(lambda: rotate_keys(run, parse_config(job.config).name))
        await plane.log(by, "job.rotate_key", job_id)
        return JobKeyView(api_key=key)

    @app.get("/jobs/{job_id}/changes", tags=["jobs"])
    async def changes(job_id: str, by: Annotated[Identity, Depends(plane.member)], after: int = 0) -> list[JobChange]:
        """Return every change of the job's state, with its time and reason."""
        await plane.job(by, job_id)
        return await store.changes(by.tenant, job_id, after)


async def _estimated(plane: ControlPlane, by: Identity, job: JobRecord) -> str | None:
    """Return what a new job will take, by former runs of its tenant; None: it does not train."""
    if job.kind != "training":
        return None
    page = await plane.store.jobs(by.tenant, states=[JobState.COMPLETED], kind=job.kind, limit=FORMER)
    runs = [plane.scheduler.folder_of(one.job_id) / RUN for one in page.jobs if same_work(one.config, job.config)]
    return await asyncio.to_thread(by_former_runs, job.config, runs)


def add_reading_routes(app: FastAPI, plane: ControlPlane) -> None:
    """Add the routes that read a job's reports and files."""
    scheduler, opened = plane.scheduler, OpenStreams(MOST_STREAMS, REFUSED)

    @app.get("/jobs/{job_id}/server", tags=["jobs"])
    async def server(job_id: str, by: Annotated[Identity, Depends(plane.member)]) -> ServerView:
        """Return the address of a job's data plane and the key that opens it; 404 while the job does not run."""
        job = await plane.job(by, job_id)
        scheduler.seen(job_id)
        if job.url is None:
            reason = scheduler.waiting.get(job_id) or job.reason
            raise NotFound(f"job {job_id} is {job.state} and has no data plane: {reason}")
        key = await read_key(scheduler.folder_of(job_id) / RUN)
        return ServerView(url=job.url, api_key=key)

    @app.get("/events", tags=["jobs"])
    async def all_events(
        by: Annotated[Identity, Depends(plane.member)],
        last_event_id: Annotated[str | None, Header()] = None,
        follow: bool = True,
    ) -> StreamingResponse:
        """Stream later state changes of all jobs of the tenant.

        The first event, `begin`, has the number of the newest change. After a lost connection, send the header
        `Last-Event-ID` to continue after the last received event.
        """
        after = streams.number_of(last_event_id)
        content = streams.tenant_events(plane, by, after, follow)
        return opened.answer(content, (by.tenant, by.user), AS_IT_COMES, MEDIA_TYPE)

    @app.get("/jobs/{job_id}/logs", tags=["jobs"])
    async def logs(
        job_id: str,
        by: Annotated[Identity, Depends(plane.member)],
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        last: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        follow: bool = False,
    ) -> StreamingResponse:
        """Return a job's log as text from the byte `offset`; with `follow` until the job has ended.

        With `last`, the text begins at most that many bytes before the present end. The header `log-offset` has the
        offset of its first byte.
        """
        await plane.job(by, job_id)
        path = scheduler.folder_of(job_id) / LOG_FILE
        if last is not None:
            offset = max(offset, await asyncio.to_thread(streams.size_of, path) - last)
        headers = {**AS_IT_COMES, "log-offset": str(offset)}
        content = streams.log(plane, by, job_id, path, offset, follow)
        return opened.answer(content, (by.tenant, by.user), headers, "text/plain; charset=utf-8")

    @app.get("/jobs/{job_id}/events", tags=["jobs"])
    async def events(
        job_id: str,
        by: Annotated[Identity, Depends(plane.member)],
        last_event_id: Annotated[str | None, Header()] = None,
        follow: bool = True,
    ) -> StreamingResponse:
        """Stream a job's state changes and reports (a `step` has its metrics), from the start.

        After a lost connection, send the header `Last-Event-ID` to continue after the last received event.
        """
        await plane.job(by, job_id)
        place = streams.StreamPlace.of(last_event_id)
        run = scheduler.folder_of(job_id) / RUN
        content = streams.events(plane, by, job_id, run, place, follow)
        return opened.answer(content, (by.tenant, by.user), AS_IT_COMES, MEDIA_TYPE)

    @app.get("/jobs/{job_id}/artifacts", tags=["jobs"])
    async def listing(job_id: str, by: Annotated[Identity, Depends(plane.member)]) -> list[ArtifactView]:
        """Return the files of a job's run: checkpoints, metrics, curve, configuration."""
        await plane.job(by, job_id)
        return await asyncio.to_thread(run_files, scheduler.folder_of(job_id) / RUN)

    @app.get("/jobs/{job_id}/artifacts/{path:path}", tags=["jobs"])
    async def download(job_id: str, path: str, by: Annotated[Identity, Depends(plane.member)]) -> FileResponse:
        """Return the content of one file of a job's run."""
        await plane.job(by, job_id)
        return FileResponse(await asyncio.to_thread(run_file, scheduler.folder_of(job_id) / RUN, path))


def job_view(job: JobRecord, waits: str | None, place: int | None = None) -> JobView:
    """Return a job as its tenant's users see it. `waits`: why it does not start; None: the record's reason."""
    made_here = ("estimate", "resources", "reason", "state", "place", "bundle_nodes")
    shown: dict[str, Any] = {name: getattr(job, name) for name in JobView.model_fields if name not in made_here}
    return JobView(
        **shown,
        state=job.state.value,
        reason=waits or job.reason,
        place=place,
        resources=body_of(job.resources),
        bundle_nodes=list(job.bundle_nodes),
    )
