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
from palestra.types.metrics import row_of_policy

pytestmark = pytest.mark.ci

# The critic, and a coefficient that has another value after each step, decide what the policy is trained on.
ALGORITHMS = {
    "grpo": {"name": "grpo"},
    "ppo": {"name": "ppo", "critic": {"warmup_steps": 1}, "kl": {"coefficient": 0.5, "target": 1.0}},
}
JOBS = {name: {"algorithm": settings} for name, settings in ALGORITHMS.items()}
# Two policies that are trained, of which one takes turns, and each of which remembers something.
JOBS["two"] = {
    "policies": {"white": {"algorithm": ALGORITHMS["ppo"]}, "black": {"updates": {"every_steps": 2}}},
    "roles": {"opponent": "black"},
    "algorithm": {"name": "rae"},
}


def names_of(row: dict[str, float]) -> set[str]:
    """The names of a row's metrics, those of agents with the one under which they are declared."""
    return {"rollout/reward/AGENT" if name.startswith("rollout/reward/") else name for name in row}


@cache
def undisturbed(name: str) -> tuple[str, int]:
    """The weights at the end, and how many commits it takes to get there."""
    with tempfile.TemporaryDirectory() as folder:

        async def run() -> tuple[str, int]:
            job = ScriptedJob(Path(folder), config(**JOBS[name]))
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


@pytest.mark.parametrize("name", JOBS)
@examples(3, 15)
@given(crashes=st.lists(st.integers(1, 220), min_size=1, max_size=3))
def test_whenever_the_process_dies_the_end_is_the_same(name, crashes):
    wanted, commits = undisturbed(name)
    assert 100 < commits < 220
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(lives(Path(folder), config(**JOBS[name]), crashes)) == wanted
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    rivals = config(**JOBS[name]).players.rivals
    known = [row_of_policy(row, policy, rivals) for row in rows for policy in rivals or ("",)]
    assert all(names_of(row) <= metric_names() for row in known)
    assert ["validation/scored" in row for row in rows] == [True, False, True, True]
