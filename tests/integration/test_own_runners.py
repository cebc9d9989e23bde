"""A job that plays its episodes itself: one command, no worker; killed, stopped, and started again."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from outcome import assert_same_metrics
from servers import SCRIPTED, TINY, Job, Plane, until

GAMES = SCRIPTED | {
    "engine": {"kind": "fake", "reply_tokens": 3},  # a digit or none; 0 to 3 are moves
    "environment": {
        "name": "frozen-lake",
        "settings": {"impossible_reward": -1.0},
        "train_tasks": 9,
        "validation_tasks": 3,
    },
    "rollout": {"group_size": 8, "groups_per_step": 2},
}
FAULTS = ("after_claim_commit:2", "after_chat_commit:9", "before_end_commit:7", "before_manifest_commit:2")
FAULTS += ("before_step:2", "before_checkpoint_rename:1", "before_publish:3")


def games(folder, **settings) -> Job:
    return Job(folder, GAMES | settings, tasks=(), validation=())


@pytest.fixture(scope="module")
def undisturbed_games(tmp_path_factory) -> Iterator[Job]:
    with games(tmp_path_factory.mktemp("undisturbed")) as job:
        job.start()
        job.finish()
        yield job


def assert_each_episode_is_trained_once(job: Job) -> None:
    trained = Counter(episode for episodes in job.manifests().values() for episode in episodes)
    completed = job.query("SELECT episode_id FROM episodes WHERE state = 'completed' AND kind = 'train'")
    assert trained == Counter(row["episode_id"] for row in completed)
    assert len(trained) == 3 * 16
    assert not job.query("SELECT 1 FROM episodes WHERE state IN ('claimed', 'registered')")


@pytest.mark.slow
def test_it_needs_no_worker(undisturbed_games):
    job = undisturbed_games
    assert_each_episode_is_trained_once(job)
    rows = job.metrics()
    assert [row["validation/total"] for row in rows] == [3, 3, 3, 3]
    assert {row["worker_id"] for row in job.query("SELECT worker_id FROM episodes")} == {"palestra-runner"}
    ended = [json.loads(row["facts"]) for row in job.query("SELECT facts FROM episodes")]
    assert {facts["termination"] for facts in ended} == {"done"}
    calls = job.query("SELECT max(idx) AS last FROM chats GROUP BY episode_id")
    assert max(row["last"] for row in calls) >= 1  # over several turns


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_job_plays_again_what_it_was_playing_and_ends_with_the_same_weights(
    tmp_path, undisturbed_games, fault
):
    with games(tmp_path) as job:
        assert job.start(fault=fault).wait() == -signal.SIGKILL, job.servers[-1].output
        job.start("--resume")
        job.finish(30)  # it does not wait for the leases of the process that is gone
        assert_each_episode_is_trained_once(job)
        assert_same_metrics(job, undisturbed_games)
        assert job.weights() == undisturbed_games.weights()


@pytest.mark.slow
def test_a_job_that_is_stopped_gives_everything_back_at_once(tmp_path):
    with games(tmp_path, engine={"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.2}) as job:
        server = job.start()
        with Plane(job.url) as plane:
            playing = until(lambda: plane.status()["rollouts"]["playing"], "episodes are played")
            assert playing <= 16
        server.send(signal.SIGTERM)
        assert server.wait(20) == 130
        assert not job.query("SELECT 1 FROM episodes WHERE state = 'claimed'")
        assert {row["attempts"] for row in job.query("SELECT attempts FROM episodes WHERE state = 'registered'")} <= {0}


@pytest.mark.slow
def test_status_says_what_the_runners_do(tmp_path):
    with games(tmp_path, steps=40, engine={"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.02}) as job:
        job.start()
        with Plane(job.url) as plane:
            status = until(lambda: found if (found := plane.status())["step"] >= 2 else None, "two steps")
        assert status["rollouts"]["done"] >= 12
        assert status["turn_seconds"].keys() >= {"pending", "generating", "interacting"}
        assert status["turn_seconds"]["generating"] > 0.02 * 12
        assert status["staleness"].keys() <= {"0"}
        assert -1.0 <= status["recent_reward"] <= 1.0


@pytest.mark.slow
def test_a_wrong_name_or_setting_is_refused_before_anything_begins(tmp_path):
    for number, (environment, said) in enumerate(
        (
            ({"name": "gomuku"}, "did you mean 'gomoku'"),
            ({"name": "gomoku", "settings": {"sise": 3}}, "sise"),
            ({"name": "gomoku", "settings": {"size": 1}}, "board"),
        )
    ):
        with games(tmp_path / str(number), environment=environment) as job:
            assert job.serve().wait() == 2
            assert said in job.servers[-1].output
            assert "Traceback" not in job.servers[-1].output


@pytest.mark.slow
def test_a_real_model_plays_and_is_trained_on_exactly_its_own_tokens(tmp_path):
    """The gap between engine and trainer would be large if a token were another, or in another place."""
    settings = TINY | {
        "environment": {"name": "calculator", "train_tasks": 9, "validation_tasks": 2},
        "policies": {"policy": TINY["policies"]["policy"] | {"max_context": 2048}},
        "rollout": {"group_size": 3, "groups_per_step": 2},
        "steps": 2,
        "algorithm": {"advantage_scale": "none", "importance_sampling": "token-truncate"},
    }
    with Job(tmp_path, settings, tasks=(), validation=()) as job:
        job.start()
        job.finish()
        assert "done" in job.servers[-1].output
        assert [row["step"] for row in job.metrics()] == [0, 1, 2]
