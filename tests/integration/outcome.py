"""What must hold of a finished run, however often its server and workers died on the way."""

from __future__ import annotations

import json
from collections import Counter

from servers import Job

from palestra.types.metrics import of_policies

DIFFERS = ("time/", "wall_seconds", "rollout/tokens_per_second")  # between two runs that did the same


def assert_complete(job: Job) -> None:
    """Every promise that needs no other run to compare with."""
    steps = int(job.settings["steps"])
    assert "done" in job.servers[-1].output
    assert job.query("SELECT count(*) AS n FROM events WHERE kind = 'completed'")[0]["n"] == 1
    _each_step_once(job, steps)
    _accepted_is_trained_once(job)
    _sampled_from_the_version_before_the_step(job)


def assert_same_metrics(job: Job, undisturbed: Job) -> None:
    """Every metric that is no time is the same."""
    assert [_timeless(row) for row in job.metrics()] == [_timeless(row) for row in undisturbed.metrics()]


def _timeless(row: dict[str, float]) -> dict[str, float]:
    """Leave out times, and how many attempts were played again: those of what was killed."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(DIFFERS) and "/time/" not in name and not name.endswith("attempts_replayed")
    }


def _each_step_once(job: Job, steps: int) -> None:
    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(steps + 1))
    trained = [name for name, policy in job.settings.get("policies", {"": {}}).items() if not policy.get("frozen")]
    own = {""} if len(trained) == 1 else set(trained)
    assert all(of_policies(row, "train/reward_mean").keys() == own for row in rows[1:])
    assert all(row["validation/scored"] == len(job.validation) for row in rows)
    assert list(job.manifests()) == list(range(1, steps + 1))
    assert {job.checkpoints(policy)[-1].name for policy in own} == {f"step-{steps:06d}"}


def _accepted_is_trained_once(job: Job) -> None:
    """What a worker was told to be accepted has that reward, and is in one batch; nothing else is."""
    accepted = {entry["episode"]: entry["reward"] for entry in job.worker_log("ended")}
    stored = {
        row["episode_id"]: json.loads(row["rewards"])["agent"]
        for row in job.query("SELECT episode_id, rewards FROM episodes WHERE state = 'completed'")
    }
    assert accepted == stored
    trained = Counter(episode for episodes in job.manifests().values() for episode in episodes)
    assert set(trained.values()) == {1}
    assert set(trained) == {episode for episode in accepted if episode.startswith("train-")}


def _sampled_from_the_version_before_the_step(job: Job) -> None:
    """No token is stale: those of step k are from version k - 1, those of the validation after it from version k.

    All tokens of a frozen policy are from version 0.0.
    """
    versions: dict[str, set[int]] = {}
    frozen = {name for name, policy in job.settings.get("policies", {}).items() if policy.get("frozen")}
    of_lease = "SELECT chats.* FROM chats JOIN episodes USING (episode_id, fence) WHERE episodes.state = 'completed'"
    for row in job.query(of_lease):
        if row["policy"] in frozen:
            assert {(incarnation, n) for incarnation, n, _ in json.loads(row["versions"])} == {(0, 0)}
            continue
        versions.setdefault(row["episode_id"], set()).update(n for _, n, _ in json.loads(row["versions"]))
    for step, episodes in job.manifests().items():
        assert {episode: versions[episode] for episode in episodes} == {episode: {step - 1} for episode in episodes}
    for row in job.query("SELECT episode_id, step FROM episodes JOIN groups USING (kind, group_index)"):
        if row["episode_id"].startswith("validation-"):
            assert versions[row["episode_id"]] == {row["step"]}, row["episode_id"]
