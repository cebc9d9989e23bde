from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from palestra.types.states import TRANSITIONS, JobState
from palestra_service.store.control_store import ControlStore
from unit.control.building import REQUEST
from unit.control.conftest import url_of_database

pytestmark = pytest.mark.ci

SCRIPT = Path(__file__).with_name("killed_process.py")
TESTS = Path(__file__).parents[2]
ORDER = ["queued", "starting", "running", "completed"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Both databases in both tiers: this is what they promise."""
    return url_of_database(request, tmp_path)


def life(url, name, lines, fault):
    """A process that is killed after so many answers, or at a fault point; returns what it was told, by key."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"} | ({"PALESTRA_FAULT": fault} if fault else {})
    told = {}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), url, name], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for count, line in enumerate(process.stdout, 1):
            if not line.endswith("\n"):  # it was killed in the middle of it
                break
            key, job_id, state = line.split()
            told[key] = (job_id, state)
            if count == lines:
                process.kill()  # SIGKILL; what was said before it is still read
    assert process.returncode == -9
    return told


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (37, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, None), (150, None), (0, "before_job_commit:40"), (0, "after_job_commit:40"))
        ),
    ],
)
async def test_a_killed_process_leaves_all_that_it_answered_and_nothing_half_done(url, lines, fault):
    told = {}
    for number in range(2):
        told |= life(url, f"life{number}", lines, fault)
    with ControlStore(url) as store:
        for key, (job_id, state) in told.items():
            job = await store.job("a", job_id)
            assert ORDER.index(job.state) >= ORDER.index(state)
            assert (await store.submit_job("a", "ann", REQUEST, key)).job_id == job_id
        numbers = []
        jobs, cursor = [], None
        while True:
            page = await store.jobs("a", cursor=cursor, limit=500)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                break
        for job in jobs:
            changes = await store.changes("a", job.job_id)
            numbers += [change.number for change in changes]
            states = [change.following for change in changes]
            assert states[0] is JobState.QUEUED
            assert all(b in TRANSITIONS[a] for a, b in pairwise(states))
            assert states[-1] is job.state
            assert job.starts == states.count(JobState.STARTING)
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
