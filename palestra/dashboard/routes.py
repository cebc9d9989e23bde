"""The routes of the page's data. Each checks the key, reads a run in a thread, and answers with JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import orjson
from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi import Path as Part
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra import __version__
from palestra.dashboard.access import PageAccess
from palestra.dashboard.answers import (
    EpisodeAnswer,
    EpisodesAnswer,
    EventsAnswer,
    GroupAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    SettingsAnswer,
    StepAnswer,
    TokensAnswer,
)
from palestra.dashboard.episode import MOST_TOKENS, EpisodeReading, episode_answer, read_reading, read_tokens
from palestra.dashboard.files import PAGE, add_files
from palestra.dashboard.progress import describe_run, read_columns, read_settings
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_events_before, read_group, read_step
from palestra.errors import InvalidRequest, NotFound, PalestraError
from palestra.http import sse
from palestra.http.sse import AS_IT_COMES, MEDIA_TYPE, News, encode_event
from palestra.store.run_log import read_events
from palestra.store.search import EpisodeFilter
from palestra.types.records import EpisodeKind
from palestra.types.states import EpisodeState

T = TypeVar("T")
READINGS = 6  # episodes that are kept for further pages of their tokens
AT_ONCE = 2  # reads at the same time, so that many pages do not hold up a job
EVENTS = 500  # of one look
DESCRIBED_SECONDS = 0.9
Whole = Annotated[int, Part(ge=0, le=2**53)]
SESSION = f"{PAGE}/session"


class ViewerKey(BaseModel):
    """The answer to `POST /dashboard/session`."""

    key: str = Field(description="Opens the routes of the page, and nothing else.")


class Search(BaseModel):
    """The query of a search for episodes; a field that is left out allows any."""

    model_config = {"extra": "forbid"}

    kind: EpisodeKind = "train"
    state: EpisodeState | None = None
    step: int | None = Field(None, ge=0, le=2**53)
    group: int | None = Field(None, ge=0, le=2**53)
    least_reward: float | None = Field(None, allow_inf_nan=False)
    most_reward: float | None = Field(None, allow_inf_nan=False)
    least_tokens: int | None = Field(None, ge=0, le=2**53)
    most_tokens: int | None = Field(None, ge=0, le=2**53)
    termination: str | None = Field(None, max_length=200)
    text: str | None = Field(None, max_length=500)
    tool: str | None = Field(None, max_length=200)
    forked: bool | None = None
    before: str | None = Field(None, max_length=40, description="`following` of the page before.")
    limit: int = Field(50, ge=1, le=200)

    @property
    def filter(self) -> EpisodeFilter:
        """Return what is searched for, without the place of the page."""
        return EpisodeFilter(
            kind=self.kind,
            state=None if self.state is None else self.state.value,
            step=self.step,
            group_index=self.group,
            least_reward=self.least_reward,
            most_reward=self.most_reward,
            least_tokens=self.least_tokens,
            most_tokens=self.most_tokens,
            termination=self.termination or None,
            text=self.text or None,
            tool=self.tool or None,
            forked=self.forked,
        )


class Reader:
    """Reads runs in threads, a few at the same time, and keeps the episodes that were read last."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs: Mapping[str, Run] = {run.name: run for run in runs}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._described: dict[str, tuple[float, RunAnswer]] = {}
        self._readings: OrderedDict[tuple[str, str], tuple[tuple[int, ...], EpisodeReading]] = OrderedDict()

    def run(self, name: str) -> Run:
        """Return a run by its name.

        Raises:
            NotFound: the page has no such run.
        """
        if name not in self.runs:
            raise NotFound(f"there is no run {name!r} here; there are {', '.join(self.runs)}")
        return self.runs[name]

    async def read(self, work: Callable[[], T]) -> T:
        """Return the result of a function that blocks."""
        async with self._room:
            return await asyncio.to_thread(work)

    async def described(self, run: Run) -> RunAnswer:
        """Return how far a run is; a second old at most, so that many pages ask for it no more often than one."""
        now = time.monotonic()
        if (known := self._described.get(run.name)) is not None and now - known[0] < DESCRIBED_SECONDS:
            return known[1]
        found = await self.read(lambda: describe_run(run))
        self._described[run.name] = now, found
        return found

    async def reading(self, name: str, episode_id: str) -> EpisodeReading:
        """Return an episode, from memory if nothing can have changed since it was read."""
        run, key = self.run(name), (name, episode_id)
        seen = run.seen
        if (known := self._readings.get(key)) is not None and (known[0] == seen or known[1].view.step is not None):
            self._readings.move_to_end(key)
            return known[1]
        found = await self.read(lambda: read_reading(run, episode_id))
        self._readings[key] = seen, found
        while len(self._readings) > READINGS:
            self._readings.popitem(last=False)
        return found


def add_page(app: FastAPI, runs: Sequence[Run], access: PageAccess, stopping: asyncio.Event) -> None:
    """Add the page and its data to an application, whose paths of `public_paths` have to be public.

    Args:
        app: the application.
        runs: what the page shows.
        access: checks keys.
        stopping: is set when the server ends, so that streams end too.
    """
    reader = Reader(runs)

    def private(request: Request, response: Response) -> None:
        access.check(request)
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"

    add_files(app)

    @app.post(SESSION, tags=["page"])
    async def session(request: Request, response: Response) -> ViewerKey:
        """Return the viewer's key for the one-time code of a link, or for a key that opens more."""
        response.headers["cache-control"] = "no-store"
        return ViewerKey(key=access.exchange(request))

    api = APIRouter(prefix=f"{PAGE}/api/runs", dependencies=[Depends(private)], tags=["page"])
    _add_run_routes(api, reader)
    _add_episode_routes(api, reader)

    @api.get("/{run}/events")
    async def events(
        request: Request, run: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0, follow: bool = True
    ) -> StreamingResponse:
        """Stream server-sent events: all after number `after` (or the header `Last-Event-ID`), then new ones."""
        last = request.headers.get("last-event-id", str(after))
        if not (last.isascii() and last.isdigit() and len(last) < 16):
            raise InvalidRequest(f"Last-Event-ID is {last!r}; it is the number of an event", "last-event-id")
        look = _look(reader, reader.run(run), int(last), lambda: access.check(request), stopping)

        async def pause(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), seconds)

        return StreamingResponse(sse.follow(look, follow, pause), 200, AS_IT_COMES, MEDIA_TYPE)

    app.include_router(api)


def _add_run_routes(api: APIRouter, reader: Reader) -> None:
    """Add the routes about runs, their metrics and their history."""

    @api.get("")
    async def runs() -> RunsAnswer:
        """List the runs of the page, with how far each is."""
        return RunsAnswer(runs=[await reader.described(run) for run in reader.runs.values()], version=__version__)

    @api.get("/{run}")
    async def one_run(run: str) -> RunAnswer:
        """Return how far a run is, and how well it does."""
        return await reader.described(reader.run(run))

    @api.get("/{run}/metrics")
    async def metrics(run: str, after: Annotated[int, Query(ge=-1, le=2**53)] = -1) -> MetricsAnswer:
        """Return the metrics of all steps after `after`, in columns."""
        found = reader.run(run)
        return await reader.read(lambda: read_columns(found, after))

    @api.get("/{run}/settings")
    async def settings(run: str) -> SettingsAnswer:
        """Return the configuration of a run."""
        found = reader.run(run)
        return await reader.read(lambda: read_settings(found))

    @api.get("/{run}/history")
    async def history(
        run: str,
        before: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> EventsAnswer:
        """Return events of a run, newest first."""
        found = reader.run(run)
        return await reader.read(lambda: read_events_before(found, before, limit))

    @api.get("/{run}/steps/{step}")
    async def step(run: str, step: Whole) -> StepAnswer:
        """Return a step: its numbers, its groups, and what was left out."""
        found = reader.run(run)
        return await reader.read(lambda: read_step(found, step))

    @api.get("/{run}/groups/{kind}/{group}")
    async def group(run: str, kind: Literal["train", "validation", "adhoc"], group: Whole) -> GroupAnswer:
        """Return the episodes of one task, side by side."""
        found = reader.run(run)
        return await reader.read(lambda: read_group(found, kind, group))


def _add_episode_routes(api: APIRouter, reader: Reader) -> None:
    """Add the routes about episodes and their tokens."""

    @api.get("/{run}/episodes")
    async def episodes(run: str, search: Annotated[Search, Query()]) -> EpisodesAnswer:
        """Search the episodes of a run, newest first; a page that took too long says where to go on."""
        found = reader.run(run)
        return await reader.read(lambda: find_episodes(found, search.filter, search.before, search.limit))

    @api.get("/{run}/episodes/{episode}")
    async def episode(run: str, episode: str) -> EpisodeAnswer:
        """Return an episode with its calls, and the outline of its rows of tokens."""
        found, reading = reader.run(run), await reader.reading(run, episode)
        return await reader.read(lambda: episode_answer(found, reading))

    @api.get("/{run}/episodes/{episode}/rows/{row}")
    async def tokens(
        run: str,
        episode: str,
        row: Whole,
        start: Annotated[int, Query(ge=0, le=2**53)] = 0,
        count: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 1000,
    ) -> TokensAnswer:
        """Return tokens of a row: id, text, logprob, advantage, weight, version, and why they were trained or not."""
        found, reading = reader.run(run), await reader.reading(run, episode)
        return await reader.read(lambda: read_tokens(found, reading, row, start, count))


def _look(
    reader: Reader, run: Run, last: int, check: Callable[[], None], stopping: asyncio.Event
) -> Callable[[], Awaitable[News | None]]:
    """Return a function that returns events after number `last`, or None once the key is void."""
    seen: tuple[int, ...] = ()
    over_before = False

    def read() -> list[bytes]:
        nonlocal last
        with run.open() as connection:
            found = read_events(connection, last, EVENTS)
        last = found[-1].event_id if found else last
        return [
            encode_event(orjson.dumps({"at": one.at, "kind": one.kind, **one.data}), one.kind, str(one.event_id))
            for one in found
        ]

    async def look() -> News | None:
        nonlocal seen, over_before
        try:
            check()
        except PalestraError:
            return None
        over, now = stopping.is_set() or not run.in_use(), run.seen
        if now == seen and over == over_before:
            return News([], over)
        try:
            chunks = await reader.read(read)
        except PalestraError:  # the list of runs says what is wrong with it
            return None
        if len(chunks) < EVENTS:
            seen, over_before = now, over
        return News(chunks, over)

    return look
