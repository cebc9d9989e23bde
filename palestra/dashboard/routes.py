"""The page's application and the routes of its data. Each checks the key and reads a run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi import Path as Part
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from palestra import __version__
from palestra.dashboard.access import OneTimeLink, PageAccess
from palestra.dashboard.answers import (
    ConversationAnswer,
    CostsAnswer,
    EpisodeDetail,
    EpisodesAnswer,
    EventsAnswer,
    FindingsAnswer,
    GroupAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    SettingsAnswer,
    SlowCallsAnswer,
    StepAnswer,
    TokensAnswer,
)
from palestra.dashboard.conversation import read_call, seen_picture
from palestra.dashboard.costs import run_costs
from palestra.dashboard.episode import MOST_TOKENS, episode_answer, read_tokens
from palestra.dashboard.files import PAGE, add_files, public_paths
from palestra.dashboard.progress import read_columns, read_settings
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_events_before, read_group, read_slow_calls, read_step
from palestra.dashboard.streams import Streams
from palestra.errors import InvalidRequest
from palestra.http.app import PUBLIC, SHOWN, build_app, picture_answer
from palestra.http.sse import encode_event
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.store.search import EpisodeFilter

Whole = Annotated[int, Part(ge=0, le=2**53)]
SESSION = f"{PAGE}/session"
AFTER = "`NAME:NUMBER` for each run that is wanted; without any, all events of all runs."


class SessionAnswer(BaseModel):
    """The answer to `POST /dashboard/session`."""

    key: str = Field(description="Opens the routes of the page, and nothing else.")
    service: bool = Field(
        False, description="Whether this is a service (`palestra serve`): the page then shows the jobs of a tenant."
    )
    talk: str | None = Field(
        description="Calls the job's policies (`/v1/chat/completions`) outside any episode: nothing of it is recorded "
        "or trained. None: no engine runs here, or the given key may only look."
    )


class Search(EpisodeFilter):
    """The query of a search for episodes; a missing field matches any value."""

    before: str | None = Field(None, max_length=40, description="`following` of the page before.")
    limit: int = Field(50, ge=1, le=200)


def add_page(app: FastAPI, runs: Sequence[Run], access: PageAccess, stopping: asyncio.Event) -> None:
    """Add the page and its data to an application, with the paths of `public_paths` public."""
    reader = Reader(runs, stopping)

    async def private(request: Request, response: Response) -> None:  # FastAPI calls others in threads
        access.check(request)
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"

    add_files(app)

    @app.post(SESSION, tags=["page"])
    async def session(request: Request, response: Response) -> SessionAnswer:
        """Return the viewer's key for the one-time code of a link, or for a key that opens more."""
        response.headers["cache-control"] = "no-store"
        return SessionAnswer(key=access.exchange(request), talk=access.talk(request))

    @app.get(f"{PAGE}/api/runs", dependencies=[Depends(private)], tags=["page"])
    async def all_runs() -> RunsAnswer:
        """List the runs of the page, with how far each is."""
        return RunsAnswer(runs=await reader.described_all(), version=__version__)

    add_run_routes(app, reader, private)
    _add_stream(app, Streams(reader, stopping), reader, access, stopping, private)


def add_run_routes(app: FastAPI, reader: Reader, allowed: Callable[..., Any]) -> None:
    """Add the routes that read one run. `allowed`: dependency of each route, authorizes the path parameter `run`."""
    api = APIRouter(prefix=f"{PAGE}/api/runs", dependencies=[Depends(allowed)], tags=["page"])
    _add_run_routes(api, reader)
    _add_episode_routes(api, reader)
    app.include_router(api)


def _add_stream(
    app: FastAPI,
    streams: Streams,
    reader: Reader,
    access: PageAccess,
    stopping: asyncio.Event,
    private: Callable[[Request, Response], Awaitable[None]],
) -> None:
    """Add the route of the stream, one for all runs of a page: browsers allow few connections to a server."""

    @app.get(f"{PAGE}/api/events", dependencies=[Depends(private)], tags=["page"])
    async def events(
        request: Request,
        after: Annotated[list[str], Query(description=AFTER, max_length=10_000)] = [],  # noqa: B006
        follow: bool = True,
    ) -> StreamingResponse:
        """Stream server-sent events of several runs: those after some numbers, then new ones until all runs are over.

        The data of each has the name of its `run`, its `event_id`, `at`, `kind`, and `data`. After a lost connection a
        client asks for the events after its last one of each run. Events of the type `run` have no number: each is the
        run's progress, as in `GET /dashboard/api/runs/{run}`, sent whenever it changes. The last event of a server that
        ends has the type `ended`: a client forgets its key, because any other program may listen there next.
        """
        positions = {reader.run(name).name: number for name, number in read_positions(after).items()}
        positions = positions or dict.fromkeys(reader.runs, 0)

        async def check() -> None:
            access.check(request)

        stream = streams.stream(positions, check)

        async def content() -> AsyncIterator[bytes]:
            async for chunk in stream.follow(follow):
                yield chunk
            if stopping.is_set():
                yield encode_event(b'{"kind": "ended"}', "ended")

        return streams.answer(stream, content())


def read_positions(after: Sequence[str]) -> dict[str, int]:
    """Return the number after which each run's events are wanted, by run."""
    found: dict[str, int] = {}
    for text in after:
        name, colon, number = text.rpartition(":")
        if not (colon and number.isascii() and number.isdigit() and len(number) < 16):
            raise InvalidRequest(f"after is {text!r}; it is NAME:NUMBER, a run and the number of an event", "after")
        found[name] = int(number)
    return found


def _add_run_routes(api: APIRouter, reader: Reader) -> None:
    """Add the routes about a run, its metrics and its history."""

    @api.get("/{run}")
    async def one_run(run: str) -> RunAnswer:
        """Return how far a run is, and how well it does."""
        return await reader.described(reader.run(run))

    @api.get("/{run}/metrics")
    async def metrics(run: str, after: Annotated[int, Query(ge=-1, le=2**53)] = -1) -> MetricsAnswer:
        """Return the metrics of all steps after `after`, in columns."""
        return await reader.read_run(run, read_columns, after)

    @api.get("/{run}/costs")
    async def costs(run: str) -> CostsAnswer:
        """Return what a run has cost so far, by phase and by policy or server."""
        return await reader.read_run(run, run_costs)

    @api.get("/{run}/settings")
    async def settings(run: str) -> SettingsAnswer:
        """Return the configuration of a run."""
        return await reader.read_run(run, read_settings)

    @api.get("/{run}/findings")
    async def findings(run: str, step: Annotated[int, Query(ge=0, le=2**53)] = 0) -> FindingsAnswer:
        """Return the doctor's findings for a run: what was found, since when, what it means, and what to try.

        The answer may be some seconds old. With `step`, it is not older than the end of that step.
        """
        return await reader.findings(reader.run(run), step)

    @api.get("/{run}/calls")
    async def calls(run: str) -> SlowCallsAnswer:
        """Return the slowest calls of the newest episodes."""
        return await reader.read_run(run, read_slow_calls)

    @api.get("/{run}/history")
    async def history(
        run: str,
        before: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        kind: Annotated[str | None, Query(max_length=100)] = None,
    ) -> EventsAnswer:
        """Return events of a run, newest first."""
        return await reader.read_run(run, read_events_before, before, limit, kind)

    @api.get("/{run}/steps/{step}")
    async def step(run: str, step: Whole) -> StepAnswer:
        """Return a step: its metrics, its groups, and left-out episodes."""
        return await reader.read_run(run, read_step, step)

    @api.get("/{run}/groups/{kind}/{group}")
    async def group(run: str, kind: Literal["train", "validation", "adhoc"], group: Whole) -> GroupAnswer:
        """Return the episodes of one task, side by side."""
        return await reader.read_run(run, read_group, kind, group)


def _add_episode_routes(api: APIRouter, reader: Reader) -> None:
    """Add the routes about episodes and their tokens."""

    @api.get("/{run}/episodes")
    async def episodes(run: str, search: Annotated[Search, Query()]) -> EpisodesAnswer:
        """Search the episodes of a run, newest first; a page that took too long says where to go on."""
        found = reader.run(run)
        return await reader.search(found, lambda: find_episodes(found, search, search.before, search.limit))

    @api.get("/{run}/episodes/{episode}")
    async def episode(run: str, episode: str) -> EpisodeDetail:
        """Return an episode with its calls, and the outline of its rows of tokens."""
        return await reader.read_run(run, episode_answer, await reader.reading(run, episode))

    @api.get("/{run}/pictures/{digest}", response_class=Response, responses=SHOWN)
    async def picture(run: str, digest: str) -> Response:
        """Return the file of a picture that the run's calls name by this digest, exactly as it was sent."""
        return await reader.read_run(run, lambda found: picture_answer(Blobs(found.folder / FOLDER), digest))

    @api.get("/{run}/pictures/{digest}/seen/{policy}", response_class=Response, responses=SHOWN)
    async def seen(run: str, digest: str, policy: str) -> Response:
        """Return the pixels that a policy's model got of a picture, as PNG; tiles are side by side.

        The header `x-palestra-tiles` has the numbers of rows and columns of tiles, or of embedding squares.
        """
        return await reader.read_run(run, seen_picture, digest, policy)

    @api.get("/{run}/episodes/{episode}/calls/{call}")
    async def conversation(run: str, episode: str, call: Whole) -> ConversationAnswer:
        """Return a call as a conversation, to go on from any message of it."""
        return await reader.read_run(run, read_call, episode, call)

    @api.get("/{run}/episodes/{episode}/rows/{row}")
    async def tokens(
        run: str,
        episode: str,
        row: Whole,
        start: Annotated[int, Query(ge=0, le=2**53)] = 0,
        count: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 1000,
    ) -> TokensAnswer:
        """Return tokens of a row: id, text, logprob, advantage, weight, version, and why they were trained or not."""
        return await reader.read_run(run, read_tokens, await reader.reading(run, episode), row, start, count)


MOST_BYTES = 1024  # of a body; no route of the page takes one


def create_page_app(
    runs: Sequence[Run], access: OneTimeLink, stopping: asyncio.Event, most_bytes: int = MOST_BYTES
) -> FastAPI:
    """Return the application that shows runs."""

    async def authenticate(request: Request) -> int:
        if request.scope["path"] != SESSION:  # whose route takes a code in place of the key
            access.check(request)
        return most_bytes

    app = build_app("Palestra dashboard", "Shows runs.", authenticate, most_bytes, {*PUBLIC, "/", *public_paths()})

    @app.get("/", include_in_schema=False)
    async def page() -> RedirectResponse:
        """Redirect to the page; browsers keep the fragment."""
        return RedirectResponse(PAGE)

    add_page(app, runs, access, stopping)
    return app
