"""The stream of a page: events of several runs, each once, which are read once for all streams."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3

import pytest

from palestra.dashboard import streams as module
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.streams import Streams
from palestra.http.sse import follow
from unit.dashboard.recorded import record


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
    return Streams(Reader(runs), stopping), stopping


async def read(streams: Streams, after: dict[str, int], wait: bool = False) -> list[tuple[str, int]]:
    chunks = [chunk async for chunk in follow(streams.look(after, lambda: None), wait)]
    events = [json.loads(chunk.partition(b"data: ")[2]) for chunk in chunks]
    return [(event["run"], event["event_id"]) for event in events]


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
    monkeypatch.setattr(module, "EVENTS", 3)
    streams, _ = opened(runs)
    newest = len(await read(streams, {"a": 0}))
    add_events(runs[0], *range(20))
    assert await read(streams, {"a": newest}) == [("a", newest + i + 1) for i in range(20)]
    assert await read(streams, {"a": newest + 15}) == [("a", newest + i + 1) for i in range(15, 20)]
    assert await read(streams, {"a": 0}) == [("a", i + 1) for i in range(newest + 20)]


async def test_many_streams_read_a_run_no_more_often_than_one(runs, monkeypatch):
    run = Run(name="a", folder=runs[0].folder, live=lambda: None)  # in use
    streams, stopping = opened([run])
    newest = len(await read(streams, {"a": 0}))
    looks = 0
    encoded = module._encoded

    def counted(*arguments):
        nonlocal looks
        looks += 1
        return encoded(*arguments)

    monkeypatch.setattr(module, "_encoded", counted)
    following = [asyncio.create_task(read(streams, {"a": newest}, wait=True)) for _ in range(20)]
    for number in range(3):
        await asyncio.sleep(0.6)
        add_events(run, number)
    await asyncio.sleep(0.8)
    stopping.set()
    for one in await asyncio.gather(*following):
        assert one == [("a", newest + i + 1) for i in range(3)]
    assert looks <= 5
