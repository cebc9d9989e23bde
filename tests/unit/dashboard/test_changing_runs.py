"""What was read of a run is forgotten when it changes: another run in its folder, or a step that goes on."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest

from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.streams import Stream, Streams
from unit.building import FakeClock, open_store
from unit.dashboard.recorded import allowed, record

NAME = "train-000000-00"


@pytest.fixture
async def run(tmp_path) -> Run:
    (tmp_path / "run").mkdir()
    return await record(tmp_path / "run")


def execute(run: Run, script: str) -> None:
    with sqlite3.connect(run.folder / "run.db") as connection:
        connection.executescript(script)
    connection.close()


async def replace(run: Run, at: float) -> None:
    """Put another run, which began at another time, into the folder."""
    run.folder.rename(run.folder.with_name("before"))  # in one step: a reader makes files beside the store it opens
    run.folder.mkdir()
    await record(run.folder)
    execute(run, f"UPDATE events SET at = {at}; UPDATE episodes SET rewards = '{{\"agent\": 7.0}}'")


async def add_events(run: Run, count: int) -> None:
    with open_store(run.folder, FakeClock()) as store:
        for number in range(count):
            await store.log.add_event("note", {"number": number})


async def news(stream: Stream, count: int) -> list[dict]:
    """Return what an open stream sends, but for how far the run is, until it has sent so much."""
    found: list[dict] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            looked = await stream.look()
            lines = b"".join(looked.chunks).decode().splitlines()
            sent = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
            found += [one for one in sent if "title" not in one]
            if not looked.chunks:
                await stream.pause(1.0)
    return found


@pytest.fixture
def at_once(monkeypatch):
    """Let feeds look at their runs without long pauses."""
    monkeypatch.setattr("palestra.dashboard.feeds.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("palestra.dashboard.feeds.FAILED_SECONDS", 0.01)


async def test_an_episode_is_that_of_the_run_that_has_the_folder_now(run):
    reader = Reader([run], asyncio.Event())
    assert (await reader.reading("recorded", NAME)).line.reward == 0.0
    await replace(run, 5.0)
    assert (await reader.reading("recorded", NAME)).line.reward == 7.0


async def test_an_episode_that_was_read_during_its_step_is_read_again_after_it(run):
    reader = Reader([run], asyncio.Event())
    execute(run, "DELETE FROM metric_rows WHERE step = 5; DELETE FROM events")
    assert (await reader.reading("recorded", "train-000002-02")).fates.episode.trained
    with open_store(run.folder, FakeClock()) as store:
        left_out = {"step": 5, "episode_id": "train-000002-02", "reason": "a logprob is not finite"}
        await store.log.add_event("episode_untrainable", left_out)
        await store.log.put_metrics(5, {"step": 5.0})
    again = await reader.reading("recorded", "train-000002-02")
    assert not again.fates.episode.trained
    await add_events(run, 1)
    assert await reader.reading("recorded", "train-000002-02") is again, "nothing of a finished step changes"


async def test_a_stream_says_that_another_run_has_the_folder_and_sends_nothing_of_the_old_one(run, at_once):
    await add_events(run, 20)
    streams = Streams(Reader([run], asyncio.Event()), asyncio.Event())
    stream = streams.stream({"recorded": 0}, allowed)
    with stream.open():
        assert len(await news(stream, 22)) == 22
        await replace(run, 5.0)
        await add_events(run, 30)  # more than the old one had
        assert await news(stream, 1) == [{"run": "recorded", "kind": "replaced"}]
        assert (await stream.look()).over
    again = streams.stream({"recorded": 3}, allowed)
    with again.open():
        found = await news(again, 29)
    assert [one["event_id"] for one in found] == [*range(4, 33)]
    assert all(one["kind"] == "note" for one in found)


async def test_a_stream_that_asks_for_what_comes_after_the_end_of_another_run_is_told_so(run):
    stream = Streams(Reader([run], asyncio.Event()), asyncio.Event()).stream({"recorded": 500}, allowed)
    with stream.open():
        assert (await news(stream, 1))[0]["kind"] == "replaced"


async def test_a_resumed_run_is_not_taken_for_another_one(run, at_once):
    stream = Streams(Reader([run], asyncio.Event()), asyncio.Event()).stream({"recorded": 0}, allowed)
    with stream.open():
        assert [one["event_id"] for one in await news(stream, 2)] == [1, 2]
        config = run.folder / "config.toml"
        config.with_suffix(".new").write_text(config.read_text())
        config.with_suffix(".new").replace(config)
        await add_events(run, 3)
        assert [one["event_id"] for one in await news(stream, 3)] == [3, 4, 5]
