"""The stream of a page: events of several runs, each once, which are read once for all streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from palestra.dashboard import feeds
from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.answers import LiveState, RunAnswer
from palestra.dashboard.progress import describe_run
from palestra.dashboard.reader import Reader
from palestra.dashboard.routes import create_page_app
from palestra.dashboard.runs import Run
from palestra.dashboard.streams import MOST_STREAMS, Streams
from palestra.errors import ServerStopping, Unauthorized
from unit.dashboard.recorded import allowed, record


def add_events(run: Run, *numbers: int) -> None:
    connection = sqlite3.connect(run.folder / "run.db")
    with connection:
        for number in numbers:
            connection.execute(
                "INSERT INTO events (at, kind, data) VALUES (1.0, 'step', ?)", (f'{{"step": {number}}}',)
            )
    connection.close()


@pytest.fixture
async def runs(tmp_path):
    (tmp_path / "a").mkdir()
    await record(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return [Run(name=name, folder=tmp_path / name) for name in "ab"]


def opened(runs: list[Run]) -> tuple[Streams, asyncio.Event]:
    stopping = asyncio.Event()
    return Streams(Reader(runs, stopping), stopping), stopping


async def read(streams: Streams, after: dict[str, int], wait: bool = False) -> list[tuple[str, int]]:
    return [(one["run"], one["event_id"]) for kind, one in await sent(streams, after, wait) if kind != "run"]


async def all_of(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


async def sent(streams: Streams, after: dict[str, int], wait: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the types of all that a stream sends, and its data."""
    stream = streams.stream(after, allowed)
    with stream.open():
        text = b"".join(await all_of(stream.follow(wait))).decode()
    lines = [one.split("\n") for one in text.split("\n\n") if one.startswith("event: ")]
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in lines]


async def test_one_stream_has_the_events_of_all_runs_and_ends_with_the_last(runs):
    streams, _ = opened(runs)
    found = await read(streams, {"a": 0, "b": 1}, wait=True)
    of_a, of_b = ([number for name, number in found if name == run] for run in "ab")
    assert of_a == list(range(1, len(of_a) + 1))
    assert of_b == of_a[1:]


async def test_what_is_in_the_store_when_a_stream_begins_is_sent_without_a_pause(runs):
    streams, _ = opened(runs)
    newest = len(await read(streams, {"a": 0}))
    for number in range(1, 4):
        add_events(runs[0], number)
        assert await read(streams, {"a": newest}) == [("a", newest + i + 1) for i in range(number)]


async def test_a_stream_that_is_far_behind_gets_all_in_order(runs, monkeypatch):
    monkeypatch.setattr(feeds, "EVENTS", 3)
    streams, _ = opened(runs)
    newest = len(await read(streams, {"a": 0}))
    add_events(runs[0], *range(20))
    assert await read(streams, {"a": newest}) == [("a", newest + i + 1) for i in range(20)]
    assert await read(streams, {"a": newest + 15}) == [("a", newest + i + 1) for i in range(15, 20)]
    assert await read(streams, {"a": 0}) == [("a", i + 1) for i in range(newest + 20)]


@pytest.mark.slow
async def test_many_streams_read_a_run_no_more_often_than_one(runs, monkeypatch):
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    streams, stopping = opened([run])
    newest = len(await read(streams, {"a": 0}))
    looks = 0
    encoded = feeds._encoded

    def counted(*arguments):
        nonlocal looks
        looks += 1
        return encoded(*arguments)

    monkeypatch.setattr(feeds, "_encoded", counted)
    following = [asyncio.create_task(read(streams, {"a": newest}, wait=True)) for _ in range(20)]
    for number in range(3):
        await asyncio.sleep(0.6)
        add_events(run, number)
    await asyncio.sleep(0.8)
    stopping.set()
    for one in await asyncio.gather(*following):
        assert one == [("a", newest + i + 1) for i in range(3)]
    assert looks <= 5


async def test_a_stream_without_news_sleeps_and_a_void_key_gets_none_of_the_next(runs, monkeypatch):
    monkeypatch.setattr(feeds, "LOOK_SECONDS", 0.02)
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    streams, _ = opened([run])
    checks, void = 0, False

    async def check() -> None:
        nonlocal checks
        checks += 1
        if void:
            raise Unauthorized("revoked")

    stream = streams.stream({"a": run.newest_event()}, check)
    with stream.open():
        following = asyncio.create_task(all_of(stream.follow()))
        await asyncio.sleep(0.5)
        assert checks == 2, "the first look, and one that finds nothing"
        void = True
        add_events(run, 7)
        chunks = await asyncio.wait_for(following, 10)
    assert checks == 3
    assert b"event: step" not in b"".join(chunks)


@pytest.mark.slow
async def test_how_far_a_run_is_comes_by_the_stream_when_it_changes_and_is_read_once_for_all(runs, monkeypatch):
    monkeypatch.setattr(feeds, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(feeds, "LINE_SHARE", 1.0)
    readings = 0

    def counted(run: Run) -> RunAnswer:
        nonlocal readings
        readings += 1
        return describe_run(run)

    monkeypatch.setattr(feeds, "describe_run", counted)
    state = LiveState(state="running", phase="playing", step=5)
    run = Run(name="a", folder=runs[0].folder, live=lambda: state)
    streams, stopping = opened([run])

    async def lines() -> list[RunAnswer]:
        newest = runs[0].newest_event()
        return [RunAnswer.model_validate(one) for _, one in await sent(streams, {"a": newest}, True)]

    following = [asyncio.create_task(lines()) for _ in range(8)]
    await asyncio.sleep(1.7)
    state = LiveState(state="running", phase="training", step=6)
    await asyncio.sleep(1.2)
    stopping.set()
    for found in await asyncio.gather(*following):
        assert [(one.live and one.live.phase, one.step) for one in found] == [("playing", 5), ("training", 6)]
    assert readings <= 8


@pytest.mark.slow
async def test_a_run_that_is_slow_to_read_is_read_seldom(runs, monkeypatch):
    monkeypatch.setattr(feeds, "LINE_SECONDS", 0.0)
    readings: list[float] = []

    def slow(run: Run) -> RunAnswer:
        readings.append(time.monotonic())
        time.sleep(0.05)
        return describe_run(run)

    monkeypatch.setattr(feeds, "describe_run", slow)
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    streams, stopping = opened([run])
    following = asyncio.create_task(read(streams, {"a": run.newest_event()}, wait=True))
    await asyncio.sleep(2.5)
    assert len(readings) == 1, "50 ms are a fifth of a percent of 25 s"
    stopping.set()
    await following
    assert len(readings) == 2, "and once at the end"


async def test_a_server_has_so_many_streams_and_no_more(runs):
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    access, stopping = OneTimeLink(), asyncio.Event()
    app = create_page_app([run], access, stopping)
    request = Request({"type": "http", "headers": [(b"authorization", f"Bearer {access.code}".encode())]})
    key = access.exchange(request)
    gone: list[asyncio.Event] = []

    async def open_one() -> list[dict[str, Any]]:
        """Open a stream of which nothing is read after its beginning; return what the server has sent."""
        sent: list[dict[str, Any]] = []
        ended, begun = asyncio.Event(), asyncio.Event()
        requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in requests:
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            begun.set()
            if len(sent) > 1 and sent[0]["status"] == 200:
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/dashboard/api/events",
            "raw_path": b"/dashboard/api/events",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key}".encode()), (b"host", b"page")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        opened.append(asyncio.create_task(app(scope, receive, send)))
        gone.append(ended)
        await asyncio.wait_for(begun.wait(), 20)
        return sent

    opened: list[asyncio.Task[None]] = []
    for _ in range(MOST_STREAMS):
        assert (await open_one())[0]["status"] == 200
    refused = await open_one()
    await asyncio.wait_for(opened[-1], 20)
    assert refused[0]["status"] == 429
    assert b"close other windows" in refused[1]["body"]
    gone[0].set()
    await asyncio.wait_for(opened[0], 20)
    assert (await open_one())[0]["status"] == 200
    for one in gone:
        one.set()
    await asyncio.gather(*opened)


@pytest.mark.slow
async def test_a_search_waits_as_long_as_the_one_before_took(runs):
    reader, times = Reader(runs, asyncio.Event()), list[float]()

    def search() -> None:
        times.append(time.monotonic())
        time.sleep(0.2)

    await asyncio.gather(*(reader.search(runs[0], search) for _ in range(3)))
    assert all(later - earlier > 0.38 for earlier, later in itertools.pairwise(times))
    began = time.monotonic()
    await reader.search(runs[1], search)
    assert time.monotonic() - began < 0.35, "another run has its own turn"


async def test_searches_that_wait_do_not_hold_up_the_end_of_the_server(runs):
    stopping = asyncio.Event()
    reader = Reader(runs, stopping)
    searches = [asyncio.create_task(reader.search(runs[0], lambda: time.sleep(0.3))) for _ in range(16)]
    await asyncio.sleep(0.05)
    stopping.set()
    began = time.monotonic()
    found = await asyncio.gather(*searches, return_exceptions=True)
    assert time.monotonic() - began < 1.0
    assert [type(one) for one in found] == [type(None)] + [ServerStopping] * 15


async def test_a_server_that_ends_says_so_as_the_last_event_of_its_streams(runs):
    """Then no page sends its key to whoever listens on the port next. A run that is over is no server that ends."""
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    access, stopping = OneTimeLink(), asyncio.Event()
    request = Request({"type": "http", "headers": [(b"authorization", f"Bearer {access.code}".encode())]})
    headers = {"authorization": f"Bearer {access.exchange(request)}"}
    transport = httpx2.ASGITransport(create_page_app([run], access, stopping))
    async with httpx2.AsyncClient(transport=transport, base_url="http://page", timeout=20) as http:
        once = await http.get("/dashboard/api/events?follow=false", headers=headers)
        following = asyncio.ensure_future(http.get("/dashboard/api/events", headers=headers))
        await asyncio.sleep(0.2)
        stopping.set()
        last = (await following).text.split("\n\n")[-2]
    assert last == 'event: ended\ndata: {"kind": "ended"}'
    assert "event: ended" not in once.text
