"""SIGKILL and SIGSTOP to workers in the middle of an episode: another plays it, and it counts once."""

from __future__ import annotations

import json
import signal

import openai
import pytest
from outcome import assert_complete, assert_same_metrics
from servers import KEY, SCRIPTED, Job, until
from worker_process import Log, converse, reward_of

from palestra import Client

pytestmark = pytest.mark.ci

SHORT_LEASE = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 1.0}}
EXPIRED = "SELECT * FROM events WHERE kind = 'lease_expired'"


def play_one(job: Job) -> str:
    """RolloutSpec the next episode in this process, under the sleeper's name, for which the job waits at its end."""
    log = Log(job.folder / "here.jsonl", "here")
    with Client(job.url, KEY, worker_id="sleeper") as client, openai.OpenAI(base_url=job.url, api_key=KEY) as ai:
        episode = client.begin_episode()
        assert episode is not None
        reward = reward_of(episode.task, converse(ai, episode, log, lambda: None))
        client.end_episode(episode, reward)
        log.write("ended", episode=episode.episode_id, reward=reward)
        return episode.episode_id


@pytest.mark.parametrize(
    ("after", "calls"),
    [
        pytest.param("claim", 0, marks=pytest.mark.slow),
        ("chat", 1),
        pytest.param("play", 2, marks=pytest.mark.slow),
    ],
)
def test_what_a_killed_worker_began_is_played_by_another_and_not_trained(tmp_path, undisturbed, after, calls):
    with Job(tmp_path, SHORT_LEASE) as job:
        job.start()
        for number in range(2):  # one after another, so that two are lost
            victim = job.work("--threads", "1", "--stop-after", after, worker_id=f"victim-{number}")
            until(lambda n=number: len(job.worker_log("stops")) == n + 1, "the worker is in the middle of an episode")
            victim.kill()
        lost = [entry["episode"] for entry in job.worker_log("stops")]
        job.work()
        assert job.servers[-1].wait() == 0
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()
        for episode in set(lost):
            fences = [row["fence"] for row in job.query("SELECT fence FROM chats WHERE episode_id = ?", episode)]
            assert fences.count(1) == calls, "what the dead worker sampled is kept to be looked at"
            assert max(fences) == 1 + lost.count(episode), "and what another sampled later is what counts"


@pytest.mark.slow
def test_a_worker_that_was_stopped_past_its_lease_gets_409_and_one_reward_counts(tmp_path, undisturbed):
    with Job(tmp_path, SHORT_LEASE) as job:
        job.start()
        sleeper = job.work("--threads", "1", "--stop-after", "play", worker_id="sleeper")
        late = until(lambda: job.worker_log("stops"), "the worker is about to end its episode")[0]["episode"]
        until(lambda: job.query(EXPIRED), "its lease runs out")
        assert play_one(job) == late
        sleeper.send(signal.SIGCONT)
        job.finish()
        lost = job.worker_log("lost")
        assert [entry["episode"] for entry in lost] == [late]
        assert "claim again" in lost[0]["why"]
        row = job.query("SELECT fence, rewards FROM episodes WHERE episode_id = ?", late)[0]
        assert row["fence"] == 2
        assert {"agent": job.worker_log("ended")[0]["reward"]} == json.loads(row["rewards"])
        assert_complete(job)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_an_episode_that_kills_every_worker_is_discarded_and_its_group_trains_without_it(tmp_path):
    settings = SHORT_LEASE | {"rollout": {"group_size": 3, "groups_per_step": 1, "max_attempts": 2, "lease_seconds": 1}}
    with Job(tmp_path, settings, validation=()) as job:
        job.start()
        for number in range(2):
            victim = job.work("--threads", "1", "--stop-after", "chat", worker_id=f"victim-{number}")
            until(lambda n=number: len(job.worker_log("stops")) == n + 1, "the worker is in the middle of an episode")
            victim.kill()
            until(lambda n=number: len(job.query(EXPIRED)) == n + 1, "its lease runs out")
        job.work()
        assert job.servers[-1].wait() == 0
        assert {entry["episode"] for entry in job.worker_log("stops")} == {"train-000000-00"}
        assert job.manifests()[1] == ["train-000000-01", "train-000000-02"]
        assert [row["train/episodes"] for row in job.metrics()] == [2, 3, 3]
        assert [row["train/episodes_discarded"] for row in job.metrics()] == [1, 0, 0]
        rows = job.query("SELECT state, attempts, reason FROM episodes WHERE episode_id = 'train-000000-00'")
        assert [tuple(row) for row in rows] == [("discarded", 2, "lease expired")]
