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

from palestra.cli.main import main
from palestra.dashboard import reader as reader_module
from palestra.dashboard import runs as run_module
from palestra.dashboard.credit import UNKNOWN_CREDIT
from palestra.dashboard.episode import episode_answer, read_reading, read_tokens
from palestra.dashboard.progress import describe_run, read_columns
from palestra.dashboard.reader import Reader, read_findings
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import find_episodes, read_group, read_slow_calls, read_step
from palestra.dashboard.streams import Streams
from palestra.doctor import examination
from palestra.errors import ConfigError, StoreError, StoreUnreachable
from palestra.store import tables
from palestra.store.search import EpisodeFilter
from unit.dashboard.recorded import REWARDS, allowed, record

# A view with all columns of the table, and without an end.
_GIVEN = {
    "episode_id": "'e' || n",
    "kind": "iif(n < 0, 'train', 'validation')",
    "group_index": "n",
    "sample_index": "0",
    "state": "''",
}
_COLUMNS = ", ".join(f"{_GIVEN.get(column.name, 'NULL')} AS {column.name}" for column in tables.episodes.columns)
ENDLESS = f"""
DROP TABLE episodes;
CREATE VIEW episodes AS WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more)
SELECT {_COLUMNS} FROM more;
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


async def test_a_table_that_is_not_there_is_the_matter_of_its_run_alone(pair):
    good, bad = pair
    execute(bad, "ALTER TABLE events RENAME TO others")
    described = await Reader([bad, good], asyncio.Event()).described_all()
    assert [one.state for one in described] == ["unreadable", "completed"]
    assert described[0].reason
    assert describe_run(good).state == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "UPDATE events SET data = '[]'",
        "UPDATE events SET data = x'ff00'",
        "UPDATE events SET at = 'noon'",
        "UPDATE metric_rows SET data = '[1]' WHERE step = 4",
        "UPDATE metric_rows SET data = '{' WHERE step = 4",
        "UPDATE metric_rows SET data = '{\"train/reward_mean\": []}' WHERE step = 4",
        "INSERT INTO events (at, kind, data) VALUES (1, 'warning', '{\"step\": \"x\"}')",
        "INSERT INTO events (at, kind, data) VALUES (1, 'episode_stale', '[\"train-000000-00\"]')",
        "UPDATE manifests SET versions = '{'",
        "UPDATE manifests SET seed = 'none'",
        *(
            f"UPDATE episodes SET {column} = '{{' WHERE sample_index = 1"
            for column in ("rewards", "task_data", "state")
        ),
        *(
            f"UPDATE chats SET {column} = x'00' WHERE episode_id = 'train-000000-01'"
            for column in ("completion", "logprobs", "versions", "fork", "reply", "agent", "seed")
        ),
    ],
)
async def test_of_a_run_with_a_damaged_record_the_rest_is_there(pair, script, capsys):
    _, bad = pair
    execute(bad, script)
    described = describe_run(bad)
    assert (described.state, described.step, described.reward) == ("completed", 5, 0.625)
    assert read_columns(bad, -1).columns["train/reward_mean"][-1] == 0.625
    assert len(read_step(bad, 5).groups) == len(REWARDS)
    assert read_group(bad, "train", 0).members[0].line.reward == 0.0
    assert read_findings(bad).step == 5
    assert read_slow_calls(bad).calls
    reading = read_reading(bad, "train-000000-00")
    assert episode_answer(bad, reading).calls
    assert read_tokens(bad, reading, 0, 0, 10).ids
    for command in (["top", str(bad.folder), "--once"], ["episodes", str(bad.folder)], ["doctor", str(bad.folder)]):
        assert main(command) in (0, 1)
    assert main(["episodes", str(bad.folder), "train-000000-00"]) == 0
    said = capsys.readouterr()
    assert "train-000002-02" in said.out
    assert "Traceback" not in said.err


async def test_of_a_group_whose_step_is_damaged_the_rest_is_there(pair, capsys):
    _, bad = pair
    execute(bad, "UPDATE groups SET step = 'five' WHERE kind = 'train' AND group_index = 1")
    found = read_group(bad, "train", 1)
    assert (found.step, [member.line.reward for member in found.members]) == (0, list(REWARDS[1]))
    assert "the step of the group can't be read" in found.notes[0]
    assert read_findings(bad).step == 5
    assert main(["doctor", str(bad.folder)]) in (0, 1)


def test_what_is_damaged_is_said(pair, capsys):
    _, bad = pair
    execute(
        bad,
        "UPDATE metric_rows SET data = '[1]' WHERE step = 4;"
        "UPDATE episodes SET metadata = '[]' WHERE sample_index = 0;"
        "INSERT INTO events (at, kind, data) VALUES (1, 'warning', '[]')",
    )
    described = describe_run(bad)
    assert (described.damaged, [one.code for one in described.warnings]) == ([4], ["damaged"])
    assert "metrics of step 4" in read_step(bad, 4).events[0].data["text"]
    assert UNKNOWN_CREDIT in episode_answer(bad, read_reading(bad, "train-000000-01")).notes
    assert UNKNOWN_CREDIT in read_group(bad, "train", 0).notes
    assert main(["doctor", str(bad.folder)]) == 0
    assert "damaged, and not looked at: the metrics of steps 4" in capsys.readouterr().out


def test_a_damaged_warning_says_so_among_the_rest(pair):
    _, bad = pair
    told = ('{"step": "x"}', '{"step": 5, "code": "c", "text": "t"}')
    execute(bad, "".join(f"INSERT INTO events (at, kind, data) VALUES (1, 'warning', '{data}');" for data in told))
    assert [(one.step, one.code) for one in describe_run(bad).warnings] == [(5, "c"), (0, "damaged")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", ["'[1]'", "'{'", "x'ff00'", "7", "'{\"train/reward_mean\": 1}'", '\'{"step": 5, "train/entropy": []}\'']
)
def test_a_damaged_row_of_metrics_is_named_and_the_rest_is_there(pair, data, capsys, monkeypatch):
    _, bad = pair
    execute(bad, f"UPDATE metric_rows SET data = {data} WHERE step = 5")
    found = describe_run(bad)
    assert (found.state, found.damaged, found.reward) == ("completed", [5], 0.5)
    columns = read_columns(bad, -1)
    assert (columns.damaged, columns.columns["step"], columns.columns["train/reward_mean"]) == ([5], [4], [0.5])
    assert read_step(bad, 5).row == {}
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["top", str(bad.folder), "--once"]) == 0
    assert "0.5 (0.5 to 0.5)" in capsys.readouterr().out
    assert main(["doctor", str(bad.folder)]) == 0


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
    newest = good.newest_event()
    execute(bad, "UPDATE events SET data = '[]' WHERE event_id = 1; UPDATE events SET at = 'x', kind = 'a' || char(10)")
    stream = Streams(Reader([bad, good], asyncio.Event()), asyncio.Event()).stream({"bad": 0, "good": 0}, allowed)
    with stream.open():
        chunks = b"".join([chunk async for chunk in stream.follow()]).decode()
    events = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: ")]
    numbered = [event["event_id"] for event in events if "event_id" in event]
    assert numbered == [*range(1, newest + 1)] * 2
    assert {event["run"]: event["state"] for event in events if "state" in event} == {
        "bad": "stopped",
        "good": "completed",
    }
    assert chunks.count("\n\n") == len(events)


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_read_that_never_ends_keeps_the_slots_of_its_run_only(pair, monkeypatch):
    good, bad = pair
    monkeypatch.setattr(reader_module, "READ_SECONDS", 0.3)
    reader, held = Reader([bad, good], asyncio.Event()), threading.Event()
    for _ in range(3):
        with pytest.raises(StoreUnreachable, match="read within"):
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
    with pytest.raises(error, match="a file"), bad.open():
        assert bad.config
    assert time.monotonic() - began < 5
    assert describe_run(bad).state == "unreadable"


@pytest.mark.parametrize("command", [["doctor"], ["episodes"], ["track", "tensorboard"]])
@pytest.mark.parametrize("name", ["run.db", "config.toml"])
async def test_no_command_waits_for_the_other_end_of_a_pipe(pair, name, command, capsys):
    _, bad = pair
    (bad.folder / name).unlink()
    os.mkfifo(bad.folder / name)
    words = [command[0], str(bad.folder), *command[1:]]
    assert await asyncio.wait_for(asyncio.to_thread(main, words), 5) == 2
    assert "run.db" in (said := capsys.readouterr().err) or "config.toml is not a file" in said


async def test_the_doctor_does_not_wait_for_a_view_without_an_end(pair, monkeypatch, capsys):
    _, bad = pair
    monkeypatch.setattr(examination, "EXAMINE_SECONDS", 0.3)
    execute(bad, ENDLESS)
    assert await asyncio.wait_for(asyncio.to_thread(main, ["doctor", str(bad.folder)]), 10) == 2
    assert "took longer than 0.3 s" in capsys.readouterr().err


@pytest.mark.slow
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
        ("CREATE TABLE events (at REAL); PRAGMA user_version = 3", "another version"),
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
