"""Two policies and two seats: SIGKILL to either worker, and to the server at every named point; nothing is lost."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from outcome import assert_complete
from servers import HERE, PALESTRA, SCRIPTED, Job, Plane, Process, until

from palestra.faults import POLICY_POINTS, SEAT_POINTS, SERVER_POINTS

pytestmark = pytest.mark.slow
ROLES = ("agent", "opponent")
DUEL = SCRIPTED | {
    "environment": {"name": "gomoku-duel"},
    "policies": {"white": {}, "black": {}},
    "roles": {"agent": "white", "opponent": "black"},
    "seats": {"roles": list(ROLES)},
    "rollout": {"group_size": 3, "groups_per_step": 2, "lease_seconds": 2.0},
    "checkpoint": {"every_steps": 1},
}
# What a worker that dies has sampled, and no action came of, is in these and nowhere else.
OF_THE_DEAD = ("train/calls_abandoned", "train/tokens_abandoned", "train/calls_frozen", "train/tokens_frozen")
# The pass at which the server dies, late enough that steps are repeated. Two saves and two publications make a step.
PASSES = {"claim": 14, "chat": 40, "generation": 30, "end": 9, "manifest": 2, "step": 3, "checkpoint": 3, "publish": 3}
PASSES |= {"publications": 2, "seat": 25}
POINTS = [f"{point}:{PASSES[point.split('_')[1]]}" for point in (*SERVER_POINTS, *POLICY_POINTS, *SEAT_POINTS)]
TIMELY = ("time/", "wall_seconds", "rollout/")


def sit(job: Job, role: str, name: str, *options: str) -> Process:
    """Start the worker of a seat."""
    command = [sys.executable, HERE / "seat_process.py", job.url, job.folder / f"{name}.jsonl", name, role, *options]
    job.workers.append(Process.start(command, job.folder / f"{name}.log"))
    return job.workers[-1]


def assert_as(job: Job, undisturbed: Job) -> None:
    """What was trained is the same, bit by bit; rewards of both seats are on disk, and each worker was told its own."""
    assert_complete(job)
    for policy in DUEL["policies"]:
        assert job.weights(policy) == undisturbed.weights(policy)
    for row, before in zip(job.metrics(), undisturbed.metrics(), strict=True):
        kept = [
            name
            for name in before
            if not name.removeprefix("white/").removeprefix("black/").startswith((*TIMELY, *OF_THE_DEAD))
        ]
        assert {name: row[name] for name in kept} == {name: before[name] for name in kept}
    stored = {
        row["episode_id"]: json.loads(row["rewards"])
        for row in job.query("SELECT episode_id, rewards FROM episodes WHERE state = 'completed'")
    }
    assert stored == {
        row["episode_id"]: json.loads(row["rewards"])
        for row in undisturbed.query("SELECT episode_id, rewards FROM episodes WHERE state = 'completed'")
    }
    told = {entry["episode"]: entry["reward"] for entry in job.worker_log("ended beside")}
    assert told == {episode: rewards["opponent"] for episode, rewards in stored.items()}
    assert "ps-" not in "".join(process.output for process in job.servers), "a key of a seat is in a log"


@pytest.fixture(scope="module")
def undisturbed_duel(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-duel"), DUEL) as job:
        job.start()
        for role in ROLES:
            sit(job, role, role)
        job.finish()
        assert_as(job, job)
        rewards = [row["white/train/reward_mean"] for row in job.metrics() if "white/train/reward_mean" in row]
        assert len(set(rewards)) > 1, "the games differ"
        assert all(row[f"{p}/train/calls_abandoned"] == 0 for row in job.metrics()[1:] for p in DUEL["policies"])
        yield job


@pytest.mark.parametrize(
    ("role", "after"),
    [
        ("agent", "chat"),
        ("opponent", "act"),
        ("agent", "claim"),
        ("agent", "act"),
        ("opponent", "claim"),
        ("opponent", "chat"),
    ],
)
def test_the_seat_of_a_killed_worker_is_played_on_by_another(tmp_path, undisturbed_duel, role, after):
    with Job(tmp_path, DUEL) as job:
        job.start()
        other = next(name for name in ROLES if name != role)
        sit(job, other, other)
        victim = sit(job, role, "victim", "--stop-after", after, "--stop-at", "12" if after == "claim" else "29")
        until(lambda: job.worker_log("stops"), "the worker is in the middle of a game")
        victim.kill()
        job.workers.remove(victim)
        sit(job, role, "heir")
        job.finish()
        assert_as(job, undisturbed_duel)
        lost = job.worker_log("stops")[0]["episode"]
        assert lost in [entry["episode"] for entry in job.worker_log("claim") if entry["worker"] == "heir"]
        events = next(
            e["events"] for e in job.worker_log() if e["episode"] == lost and e["worker"] == other and "events" in e
        )
        assert [kind for kind, of in events if of == role] == ["seat_claimed", "seat_left", "seat_claimed"]
        (row,) = job.query("SELECT facts, fence FROM episodes WHERE episode_id = ?", lost)
        assert row["fence"] == 1, "the episode is the same attempt"
        assert len(json.loads(row["facts"]).get("unused_calls", [])) == (after == "chat")


@pytest.mark.parametrize("fault", [*(pytest.param(one, marks=pytest.mark.long) for one in POINTS[:-1]), POINTS[-1]])
def test_a_killed_server_plays_its_games_again_and_both_workers_come_back(tmp_path, undisturbed_duel, fault):
    killed_in_turn(tmp_path, undisturbed_duel, [fault])


def test_a_server_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path, undisturbed_duel):
    faults = ["before_seat_claim:5", "before_seat_action:31", "after_end_commit:3", "after_checkpoint_rename:1"]
    killed_in_turn(tmp_path, undisturbed_duel, faults)


def killed_in_turn(folder: Path, undisturbed: Job, faults: list[str]) -> None:
    """Kill the server of a duel at each of the points, start it again, and compare what comes out."""
    with Job(folder, DUEL) as job:
        for number, fault in enumerate(faults):
            server = job.start(*(["--resume"] if number else []), fault=fault)
            if number == 0:
                for role in ROLES:
                    sit(job, role, role)
            assert server.wait() == -signal.SIGKILL, f"{fault} was not met:\n{server.output}"
        job.start("--resume")
        job.finish()
        assert_as(job, undisturbed)


def test_a_person_has_the_key_of_one_seat(tmp_path):
    """With the key that `palestra seat-key` prints: it claims its seat, and opens nothing else."""
    import subprocess

    with Job(tmp_path, DUEL) as job, Plane(job.url) as plane:
        job.start()
        made = [
            subprocess.run([PALESTRA, "seat-key", job.run_dir, role], capture_output=True, text=True, check=False)
            for role in (*ROLES, "judge")
        ]
        assert made[2].returncode == 2
        assert "has no seat 'judge'; its seats are: 'agent', 'opponent'" in made[2].stderr
        key, other = (one.stdout.strip() for one in made[:2])
        assert key != other
        body = {"worker_id": "w", "request_id": "r", "role": "agent", "wait_seconds": 10}
        assert plane.post("/claim_episode", body, other).status_code == 403
        assert plane.post("/claim_episode", {"request_id": "q"}, key).status_code == 403
        assert plane.get("/status", key).status_code == 403
        claimed = plane.post("/claim_episode", body, key).json()["episode"]
        assert (claimed["role"], claimed["task"], claimed["model"]) == ("agent", {}, "white")
        assert plane.post("/v1/chat/completions", {"model": "x", "messages": []}, key).status_code == 403
        assert plane.end(claimed).status_code == 403
