"""The process may die before any commit: the run that goes on ends with the weights of one that never stopped.

Promise 3, with a fake engine and a trainer whose weights are a hash of all that it was trained on: each accepted
episode is trained exactly once, in the same order, whatever happened in between. (Real processes and real signals are
in tests/integration.)
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import metric_names
from unit.learner.scripted_job import Crash, ScriptedJob, config

from palestra.config import JobConfig

# The critic, and a coefficient that has another value after each step, decide what the policy is trained on.
ALGORITHMS = {
    "grpo": {"name": "grpo"},
    "ppo": {"name": "ppo", "critic": {"warmup_steps": 1}, "kl": {"coefficient": 0.5, "target": 1.0}},
}


@cache
def undisturbed(name: str) -> tuple[str, int]:
    """The weights at the end, and how many commits it takes to get there."""
    with tempfile.TemporaryDirectory() as folder:

        async def run() -> tuple[str, int]:
            job = ScriptedJob(Path(folder), config(algorithm=ALGORITHMS[name]))
            return await job.run(), job.commits

        return asyncio.run(run())


async def lives(folder: Path, settings: JobConfig, crashes: list[int]) -> str:
    """One life a crash, and a last one that is left alone."""
    for commit in crashes:
        job = ScriptedJob(folder, settings, crash_at=commit)
        try:
            return await job.run()  # it was done before it came to that
        except Crash:
            pass
    return await ScriptedJob(folder, settings).run()


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(4, 15)
@given(crashes=st.lists(st.integers(1, 220), min_size=1, max_size=3))
def test_whenever_the_process_dies_the_end_is_the_same(name, crashes):
    wanted, commits = undisturbed(name)
    assert 100 < commits < 220
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(lives(Path(folder), config(algorithm=ALGORITHMS[name]), crashes)) == wanted
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row.keys() <= metric_names() for row in rows)
    assert ["validation/reward_mean" in row for row in rows] == [True, False, True, True]
