"""A run that can't be read, whatever its files have, leaves the other runs of the page alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from palestra.dashboard import reader as reading
from palestra.dashboard import runs as run_module
from palestra.dashboard.progress import describe_run
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_events_after
from palestra.dashboard.streams import Streams
from palestra.errors import ConfigError, StoreError, StoreUnreachable
from palestra.http.sse import follow
from palestra.store.search import EpisodeFilter
from unit.dashboard.recorded import allowed, record

ENDLESS = """
DROP TABLE episodes;
CREATE VIEW episodes AS WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more)
SELECT 'e' || n AS episode_id, iif(n < 0, 'train', 'validation') AS kind, n AS group_index,
    0 AS sample_index, '' AS state
FROM more;
"""


@pytest.fixture
async def pair(tmp_path):
    """A good run, and a copy to be damaged."""
    (tmp_path / "good").mkdir()
    good = await record(tmp_path / "good")
    shutil.copytree(good.folder, tmp_path / "bad")
    return Run(name="good", folder=good.folder), Run(name="bad", folder=tmp_path / "bad")


def execute(run: Run, script: str) -> None:
    connection = sqlite3.connect(run.folder / "run.db")
    connection.executescript(script)
    connection.close()


@pytest.mark.parametrize(
    "script",
    [
        "UPDATE events SET data = '[]'",
        "UPDATE events SET data = x'ff00'",
        "UPDATE events SET at = 'noon'",
        "UPDATE metric_rows SET data = '[1]'",
        "UPDATE metric_rows SET data = '{\"train/reward_mean\": []}'",
        "INSERT INTO events (at, kind, data) VALUES (1, 'warning', '{\"step\": \"x\"}')",
        "ALTER TABLE events RENAME TO others",
    ],
)
async def test_a_damaged_record_is_the_matter_of_its_run_alone(pair, script):
    good, bad = pair
    execute(bad, script)
    described = await Reader([bad, good], asyncio.Event()).described_all()
    assert [one.state for one in described] == ["unreadable", "completed"]
    assert described[0].reason
    assert describe_run(good).state == "completed"


@pytest.mark.parametrize("value", ["[1]", "7", '"text"'])
@pytest.mark.parametrize("column", ["metadata", "rewards"])
async def test_an_episode_with_a_damaged_record_is_shown_as_damaged_among_the_rest(pair, column, value):
    _, bad = pair
    execute(bad, f"UPDATE episodes SET {column} = '{value}' WHERE sample_index = 1")
    found = find_episodes(bad, EpisodeFilter(termination="done"), None, 50).episodes
    assert [line.episode_id[-2:] for line in found if line.damaged] == ["01"] * 3
    assert len(found) > 3


async def test_damaged_events_do_not_end_the_stream(pair):
    good, bad = pair
    newest = len(read_events_after(good, 0, 500))
    execute(bad, "UPDATE events SET data = '[]' WHERE event_id = 1; UPDATE events SET at = 'x', kind = 'a' || char(10)")
    look = Streams(Reader([bad, good], asyncio.Event()), asyncio.Event()).look({"bad": 0, "good": 0}, allowed)
    chunks = b"".join([chunk async for chunk in follow(look, True)]).decode()
    events = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: ")]
    assert [event["event_id"] for event in events] == [*range(1, newest + 1)] * 2
    assert chunks.count("\n\n") == len(events)


async def test_a_view_without_an_end_takes_its_time_and_no_more(pair, monkeypatch):
    good, bad = pair
    monkeypatch.setattr(run_module, "QUERY_SECONDS", 0.5)
    execute(bad, ENDLESS)
    reader = Reader([bad, good], asyncio.Event())
    began = time.monotonic()
    searches = [reader.read(bad, lambda: find_episodes(bad, EpisodeFilter(kind="train"), None, 50)) for _ in range(3)]
    slow = [asyncio.create_task(search) for search in searches]
    await asyncio.sleep(0.1)
    assert (await reader.described(good)).state == "completed"
    assert time.monotonic() - began < 0.5, "the other run waits for nothing"
    for error in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(error, StoreError), error
        assert "took longer than 0.5 s" in str(error)
    described = await reader.described_all()
    assert [one.state for one in described] == ["unreadable", "completed"]
    assert time.monotonic() - began < 10


async def test_a_read_that_never_ends_keeps_the_slots_of_its_run_only(pair, monkeypatch):
    good, bad = pair
    monkeypatch.setattr(reading, "READ_SECONDS", 0.3)
    reader, held = Reader([bad, good], asyncio.Event()), threading.Event()
    for _ in range(3):
        with pytest.raises(StoreUnreachable, match="could not be read within"):
            await reader.read(bad, held.wait)
    assert (await reader.described(good)).state == "completed"
    held.set()
    until = time.monotonic() + 5
    while (await reader.described(bad)).state != "completed":
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(("name", "error"), [("run.db", StoreError), ("config.toml", ConfigError)])
async def test_a_pipe_in_place_of_a_file_is_not_opened(pair, name, error):
    _, bad = pair
    (bad.folder / name).unlink()
    os.mkfifo(bad.folder / name)
    began = time.monotonic()
    with pytest.raises(error, match="is not a file"), bad.open():
        assert bad.config
    assert time.monotonic() - began < 5
    assert describe_run(bad).state == "unreadable"


def test_a_read_does_not_keep_the_process_from_ending():
    script = """
import asyncio, time
from pathlib import Path
from palestra.dashboard.reader import Reader
from palestra.dashboard.runs import Run

async def main():
    run = Run(name="a", folder=Path("/nowhere"))
    asyncio.ensure_future(Reader([run], asyncio.Event()).read(run, lambda: time.sleep(600)))
    await asyncio.sleep(0.2)

asyncio.run(main())
print("ended")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert found.stdout == b"ended\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "is empty"),
        ("CREATE TABLE recipes (name TEXT)", "is not the store of a run"),
        ("CREATE TABLE events (at REAL); PRAGMA user_version = 3", "early version"),
    ],
)
async def test_a_file_that_is_no_store_of_a_run_is_said_to_be_none(pair, script, why):
    _, bad = pair
    (bad.folder / "run.db").write_bytes(b"")
    if script is not None:
        execute(bad, script)
    found = describe_run(bad)
    assert found.state == "unreadable"
    assert why in (found.reason or "")
