"""The job may be stopped at any commit: what it leaves agrees with itself, and the run that goes on ends like one that
was never stopped.

The same as `test_crash_anywhere.py` for the stop that SIGINT and SIGTERM ask for, which ends well: it has to leave rows
that agree, and a state that says whether anything is left to do.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.learner.scripted_job import ScriptedJob, config

from palestra.types.states import JobState

LAST = 3
DIFFERS = ("time/", "wall_seconds", "rollout/tokens_per_second")


def rows_of_file(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows_of_store(folder: Path) -> list[dict[str, float]]:
    with sqlite3.connect(folder / "run.db") as db:
        return [json.loads(row) for (row,) in db.execute("SELECT data FROM metric_rows ORDER BY step")]


def timeless(rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(DIFFERS) and not name.endswith("attempts_replayed")
        }
        for row in rows
    ]


@cache
def undisturbed() -> tuple[str, int, list[dict[str, Any]]]:
    """The weights at the end, how many commits it takes to get there, and the rows."""
    with tempfile.TemporaryDirectory() as folder:
        job = ScriptedJob(Path(folder), config())
        weights = asyncio.run(job.run())
        assert timeless(rows_of_file(Path(folder))) == timeless(rows_of_store(Path(folder)))
        return weights, job.commits, timeless(rows_of_file(Path(folder)))


async def stopped_at(folder: Path, commit: int) -> ScriptedJob:
    job = ScriptedJob(folder, config(), stop_at=commit)
    await job.run()
    return job


def assert_agrees(folder: Path, job: ScriptedJob) -> None:
    """A job is completed when every row of its steps is there, and only then; file and store have the same rows."""
    in_file = rows_of_file(folder)
    assert timeless(in_file) == timeless(rows_of_store(folder))
    finished = [row["step"] for row in in_file]
    assert finished == list(range(len(finished)))
    whole = finished[-1:] == [LAST] and "validation/reward_mean" in in_file[-1]
    assert job.progress.state is (JobState.COMPLETED if whole else JobState.RUNNING)
    with sqlite3.connect(folder / "run.db") as db:
        (completed,) = db.execute("SELECT count(*) FROM events WHERE kind = 'completed'").fetchone()
    assert bool(completed) == whole


@examples(4, 25)
@given(st.lists(st.integers(1, 220), min_size=1, max_size=3))
def test_whenever_it_is_stopped_what_it_leaves_agrees_and_the_end_is_the_same(stops):
    weights, commits, rows = undisturbed()
    assert 100 < commits < 220
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for commit in stops:
            assert_agrees(folder, asyncio.run(stopped_at(folder, commit)))
        assert asyncio.run(ScriptedJob(folder, config()).run()) == weights
        assert timeless(rows_of_file(folder)) == timeless(rows_of_store(folder)) == rows


@pytest.mark.slow
def test_at_every_commit_of_the_last_evaluation():
    weights, commits, rows = undisturbed()
    for commit in range(commits - 12, commits + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            assert_agrees(folder, asyncio.run(stopped_at(folder, commit)))
            assert asyncio.run(ScriptedJob(folder, config()).run()) == weights
            assert timeless(rows_of_file(folder)) == timeless(rows_of_store(folder)) == rows
