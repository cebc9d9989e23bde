"""`VerifiersRollout` in a worker with the real verifiers, at the data plane of a real job."""

from __future__ import annotations

import json
import subprocess

import pytest
from servers import KEY, SCRIPTED, Job

from partners.environment import BEHIND, ROOT, clean, python_of

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600)]
TASKS = [{"id": f"sum-{n}", "idx": n} for n in range(7)]


def worker(job: Job, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start `palestra worker` in the environment of verifiers, with this checkout's package."""
    rollout = f"{BEHIND / 'verifiers_worker.py'}:rollout"
    command = [python_of("verifiers"), "-m", "palestra.cli.main", "worker", rollout, "--url", job.url, *options]
    environment = {**clean(), "PYTHONPATH": str(ROOT), "PALESTRA_API_KEY": KEY, **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 300) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        process.kill()


def test_a_job_records_every_call_of_an_environment_of_verifiers(tmp_path):
    with Job(tmp_path, SCRIPTED, tasks=TASKS, validation=[{"id": "held-out", "idx": 30}]) as job:
        job.start()
        said = ended(worker(job, "--concurrency", "4"))
        assert job.servers[-1].wait(120) == 0, said
        episodes = job.query("SELECT * FROM episodes WHERE state = 'completed'")
        assert len(episodes) >= 12
        for episode in episodes:
            found = json.loads(episode["metadata"])["verifiers"]
            # What verifiers' own rubric says, against the reward that is trained: `right` weighs 1, `short` a half.
            (reward,) = json.loads(episode["rewards"]).values()
            assert reward == found["rewards"]["right"] + found["rewards"]["short"]
            assert found["rewards"]["short"] == 0.5
            assert found["turns"] == 2
        calls = job.query("SELECT episode_id, count(*) AS calls, count(fork) AS forks FROM chats GROUP BY episode_id")
        assert {(row["calls"], row["forks"]) for row in calls} == {
            (2, 0)
        }  # the second call continues the first, exactly


def test_an_episode_that_verifiers_can_not_score_has_no_reward(tmp_path):
    settings = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "max_attempts": 1}}
    with Job(tmp_path, settings, tasks=TASKS, validation=()) as job:
        job.start()
        said = ended(worker(job, FAILS_FROM="0"))
        assert "0 episodes played" in said
        assert not job.query("SELECT * FROM episodes WHERE rewards IS NOT NULL")
