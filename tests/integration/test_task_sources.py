"""Tasks of `train` in every form: stored once, read once, and never all in memory."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from contextlib import closing
from itertools import count
from pathlib import Path

import orjson
import pytest
from unit.building import FakeClock, open_store

import palestra
from palestra import JobConfig
from palestra.client import task_files
from palestra.client.task_files import SpooledTasks
from palestra.errors import ConfigError, Conflict, InvalidRequest
from palestra.runtime.tasks import load_tasks
from palestra.store.browsing import browse
from palestra.store.tables import tasks as stored_tasks

pytestmark = pytest.mark.ci

ROWS = [{"id": f"t{number}", "prompt": f"what is {number}?"} for number in range(6)]


class Stream:
    """A streaming data set: no length, and a new iterator each time."""

    def __iter__(self):
        return iter(ROWS)


class Frame:
    """The part of a DataFrame of polars that is used."""

    columns = ("id", "prompt")

    def __len__(self):
        return len(ROWS)

    def iter_rows(self, *, named):
        return iter(ROWS)


def job(folder: Path, **settings) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": folder / "run",
            "steps": 1,
            "rollout": {"group_size": 2, "groups_per_step": 6},
            "engine": {"kind": "fake", "reply_tokens": 2},
            "evaluation": {"every_steps": 0},
        }
        | settings
    )


def play(folder: Path, given, resume: bool = False, **settings):
    played: set[str] = set()

    def reward(task, answer):
        played.add(task["id"])
        return float(len(played) % 2)

    palestra.train(tasks=given, reward=reward, config=job(folder, **settings), resume=resume, quiet=True)
    return played


def not_read():
    raise AssertionError("tasks that are stored are not read again")
    yield


WAYS = {
    "list": lambda folder: ROWS,
    "iterator": lambda folder: iter(ROWS),
    "generator": lambda folder: (row for row in ROWS),
    "function": lambda folder: lambda: iter(ROWS),
    "stream": lambda folder: Stream(),
    "frame": lambda folder: Frame(),
    "path": lambda folder: folder / "tasks.jsonl",
}


@pytest.mark.parametrize(
    "way", [way if way == "function" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_tasks_in_every_form_are_stored_once_and_played(way, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert play(tmp_path, WAYS[way](tmp_path)) == {row["id"] for row in ROWS}
    with browse(tmp_path / "run" / "run.db") as connection:
        found = [json.loads(row.data) for row in connection.execute(stored_tasks.select().order_by("place"))]
    assert found == ROWS
    assert not [path.name for path in (tmp_path / "run").iterdir() if "task" in path.name or "tmp" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("again", [not_read(), not_read, Path("absent.jsonl"), (), ROWS, tuple(ROWS[:2])])
def test_a_resumed_run_plays_the_tasks_that_it_has(again, tmp_path):
    play(tmp_path, iter(ROWS))
    assert play(tmp_path, again, resume=True, steps=2) == {row["id"] for row in ROWS}


def test_a_resumed_run_refuses_a_list_with_other_tasks(tmp_path):
    play(tmp_path, ROWS)
    with pytest.raises(Conflict, match="'t9'"):
        play(tmp_path, [*ROWS, {"id": "t9", "prompt": "?"}], resume=True, steps=2)


def test_an_endless_iterator_is_read_for_as_many_groups_as_there_are(tmp_path):
    numbers = count()
    assert len(play(tmp_path, ({"id": str(number), "prompt": "?"} for number in numbers))) == 6
    assert next(numbers) == 6


@pytest.mark.parametrize("made", [Frame, lambda: ROWS])
def test_tasks_with_a_length_are_all_taken_also_from_a_function(made, tmp_path):
    play(tmp_path, made, rollout={"group_size": 2, "groups_per_step": 2})
    with browse(tmp_path / "run" / "run.db") as connection:
        assert len(connection.execute(stored_tasks.select()).all()) == len(ROWS)


def test_validation_tasks_alone_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="training tasks"):
        palestra.train(validation_tasks=ROWS, reward=lambda task, answer: 1.0, config=job(tmp_path), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tasks", "error", "said"),
    [
        (iter([ROWS[0], 3]), InvalidRequest, "task 1"),
        (iter([ROWS[0], {"id": "x", "prompt": b"?"}]), InvalidRequest, r"task 1 \(id 'x'\): 'prompt'"),
        (iter([ROWS[0], {"id": "x"}]), ConfigError, "task 1: the task has no key `prompt`"),
        (lambda: 3, ConfigError, "has the type int"),
    ],
)
def test_a_wrong_task_is_named_and_leaves_no_run(tasks, error, said, tmp_path):
    with pytest.raises(error, match=said):
        play(tmp_path, tasks)
    assert not (tmp_path / "run").exists()


def test_a_line_of_a_file_that_can_not_be_asked_is_named(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n\n{"x": 1}\n')
    for given, named in ((tmp_path / "tasks.jsonl", {}), ((), {"train": tmp_path / "tasks.jsonl"})):
        with pytest.raises(ConfigError, match=r"tasks\.jsonl:3.*`prompt`"):
            play(tmp_path, given, **{"tasks": named})
    assert not (tmp_path / "run").exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from integration.test_task_sources import ROWS, play

def tasks():
    yield from ROWS[:3]
    if sys.argv[2] != "none":
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
    yield from ROWS[3:]

print(sorted(play(Path(sys.argv[1]), tasks())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGINT"])
def test_a_process_that_is_killed_while_it_reads_leaves_nothing(sign, tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    tests = str(Path(__file__).parents[1])
    killed = subprocess.run([*words, sign, tests], check=False, capture_output=True)
    assert killed.returncode in (-signal.Signals[sign], 130), killed.stderr.decode()
    assert not list(tmp_path.iterdir())
    again = subprocess.run([*words, "none", tests], check=True, capture_output=True, text=True)
    assert again.stdout.count("'t") == len(ROWS)


async def test_a_start_that_was_broken_off_begins_again_with_what_an_iterator_gives_now(tmp_path, monkeypatch):
    monkeypatch.setattr(task_files, "BLOCK", 40)  # two lines
    config = JobConfig.model_validate({"run_dir": tmp_path})
    with open_store(tmp_path, FakeClock()) as store:
        push = store.tasks.push_texts

        async def broken(split, names, texts, chunk):
            if chunk.endswith("3"):
                raise KeyboardInterrupt
            return await push(split, names, texts, chunk)

        monkeypatch.setattr(store.tasks, "push_texts", broken)
        with pytest.raises(KeyboardInterrupt), closing(SpooledTasks(ROWS, "tasks")) as source:
            await load_tasks(store.tasks, config, {"train": source})
        assert len(await store.tasks.stored("train")) == 4
        monkeypatch.setattr(store.tasks, "push_texts", push)
        await load_tasks(store.tasks, config, {"train": SpooledTasks(reversed(ROWS), "tasks")})
        assert [task.data for task in await store.tasks.stored("train")] == ROWS[::-1]
        assert await store.tasks.sealed()


async def test_an_iterator_of_many_tasks_takes_the_memory_of_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(task_files, "MEMORY", 2**18)
    monkeypatch.setattr(task_files, "BLOCK", 2**18)
    rows = ({"id": f"t{number}", "prompt": "x" * 4000} for number in range(4000))  # 16 MB
    with open_store(tmp_path, FakeClock()) as store:
        tracemalloc.start()
        try:
            with closing(SpooledTasks(rows, "tasks", tmp_path)) as source:
                await load_tasks(store.tasks, JobConfig(run_dir=tmp_path), {"train": source})
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(await store.tasks.stored("train")) == 4000
        assert most < 4 * 2**20, f"{most / 2**20:.0f} MiB"
        assert (tmp_path / "run.db-wal").stat().st_size < 8 * 2**20


STORED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from integration.test_task_sources import ROWS, play
from palestra.client import task_files
from palestra.store import tasks

task_files.BLOCK, insert = 40, tasks._insert  # two lines

def killed(connection, split, place, names, texts):
    insert(connection, split, place, names, texts)
    if place == 2:
        os.kill(os.getpid(), signal.SIGKILL)

tasks._insert = killed
play(Path(sys.argv[1]), Path(sys.argv[1]) / "tasks.jsonl")
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_stores_begins_again(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [sys.executable, "-c", STORED, str(tmp_path), str(Path(__file__).parents[1])]
    killed = subprocess.run(words, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with browse(tmp_path / "run" / "run.db") as connection:
        assert len(connection.execute(stored_tasks.select()).all()) == 2
    assert play(tmp_path, tmp_path / "tasks.jsonl", resume=True) == {row["id"] for row in ROWS}
    with browse(tmp_path / "run" / "run.db") as connection:
        found = [json.loads(row.data) for row in connection.execute(stored_tasks.select().order_by("place"))]
    assert found == ROWS


def started(folder: Path, *words: str) -> list[list[float]]:
    """Return the figures of `bench/task_start.py`, a row for each way."""
    bench = Path(__file__).parents[2] / "bench" / "task_start.py"
    done = subprocess.run(
        [sys.executable, str(bench), "--folder", str(folder), *words], check=True, capture_output=True, text=True
    )
    return [[float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", row)] for row in done.stdout.splitlines()[3:]]


def floor(folder: Path, count: int) -> float:
    """Return the seconds of processor time that a million tasks take which are parsed and inserted, and no more."""
    path = folder / "floor.db"
    lines = [orjson.dumps({"id": f"t{n}", "prompt": f"what is {n} and {n}? " + "x" * 15}) for n in range(count)]
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA journal_mode=WAL")
        store.execute("CREATE TABLE tasks (place INTEGER PRIMARY KEY, task_id TEXT UNIQUE, data TEXT)")
        began = time.process_time()
        rows = ((n, orjson.loads(line)["id"], line.decode()) for n, line in enumerate(lines))
        store.executemany("INSERT INTO tasks VALUES (?, ?, ?)", rows)
        store.commit()
        spent = time.process_time() - began
    path.unlink()
    return spent * 1_000_000 / count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_tasks_take_few_seconds_of_processor_time(tmp_path):
    """10 s where the floor takes 3: beside others a processor's seconds are worth less."""
    for way in ("file", "iterator"):
        floors = [floor(tmp_path, 300_000)]
        ((_, seconds, *_),) = started(tmp_path, way)
        floors.append(floor(tmp_path, 300_000))
        assert seconds <= 10 / 3 * max(3.0, *floors), f"{way}: {seconds} s; floor {floors} s"


@pytest.mark.slow
def test_a_job_of_a_large_file_starts_with_the_memory_of_a_small_one(tmp_path):
    for figures in started(
        tmp_path, "--tasks", "200000", "--bytes", "200000000", "large file", "large iterator", "list"
    ):
        assert figures[2] < 150, f"MiB: {figures}"
        assert figures[3] < 64, f"MiB of the log: {figures}"
