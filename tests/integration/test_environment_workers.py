"""`palestra worker` and `environment.runners` with environments: real processes that play, die and drain."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fleet_environments import Echo
from outcome import assert_same_metrics
from servers import HERE, PALESTRA, SCRIPTED, TINY, Job, Plane, Process, until

import palestra
from palestra.config import parse_config

OWN = HERE / "fleet_environments.py"
SHORT = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 1.0}}
WALKS = SCRIPTED | {
    "engine": {"kind": "fake", "reply_tokens": 3},  # a digit or none; 0 to 3 are moves
    "environment": {
        "name": "frozen-lake",
        "settings": {"impossible_reward": -1.0},
        "train_tasks": 9,
        "validation_tasks": 3,
    },
}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_FOLDER", str(tmp_path))
    started = []

    def start(url: str, played: str, *options: object) -> Process:
        command = [PALESTRA, "worker", played.replace("OWN", str(OWN)), "--url", url, *options]
        started.append(Process.start(command, tmp_path / f"fleet-{len(started)}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A job whose episodes one worker plays without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Job(folder, SHORT) as job:
        job.start()
        worker = Process.start([PALESTRA, "worker", f"{OWN}:Echo", "--url", job.url], folder / "worker.log")
        job.finish()
        assert worker.wait() == 0, worker.output
        yield job


def weights_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_two_processes_train_to_the_weights_of_one_process_bit_for_bit(tmp_path, fleet):
    """With a real model: the job's own process plays, and then two processes beside it do."""
    tasks = [{"text": f"task {number}"} for number in range(4)]
    settings = TINY | {"steps": 2, "evaluation": {"every_steps": 0}, "trainer": {"threads": 1}}
    config = parse_config({**settings, "run_dir": str(tmp_path / "one")})
    one = palestra.train(environment=Echo, tasks=tasks, config=config, quiet=True)
    with Job(tmp_path / "two", settings, tasks=tasks, validation=()) as job:
        job.start()
        worker = fleet(job.url, "OWN:Echo", "--processes", 2, "--concurrency", 2)
        job.finish()
        assert worker.wait() == 0, worker.output
        names = {row["worker_id"] for row in job.query("SELECT DISTINCT worker_id FROM episodes")}
        assert len(names) == 2, "both processes have played"
        assert weights_of(job.checkpoints()[-1]) == weights_of(one.checkpoint)


@pytest.mark.slow
def test_processes_that_die_are_replaced_and_their_episodes_are_played_again(tmp_path, fleet, undisturbed):
    with Job(tmp_path / "job", SHORT) as job:
        job.start()
        worker = fleet(job.url, "OWN:DiesOnce", "--concurrency", 2)
        job.finish()
        assert worker.wait() == 0, worker.output
        assert worker.output.count("was killed by SIGKILL; started again") == 2
        assert max(row["attempts"] for row in job.query("SELECT attempts FROM episodes")) > 1
        assert job.weights() == undisturbed.weights(), "no failure was taken for a reward"
        assert_same_metrics(job, undisturbed)


MESSAGES = ("claim", "first call", "second call", "end")  # of an episode of Echo


@pytest.mark.slow
def test_a_worker_that_is_killed_at_any_message_loses_and_doubles_nothing(tmp_path, undisturbed):
    """One job; the worker of each life is killed before it sends a message, or when the answer to it has come."""
    rollout = {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 0.5, "max_attempts": 20}}
    with Job(tmp_path, SCRIPTED | rollout) as job:
        job.start()
        script = HERE / "killed_player_process.py"

        def life(number: int, when: str) -> Process:
            command = [sys.executable, script, job.url, number, when]
            job.workers.append(Process.start(command, tmp_path / f"{when}-{number}.log", fresh=False))
            return job.workers[-1]

        for number in range(1, len(MESSAGES) + 1):
            for when in ("before", "after"):
                worker = life(number, when)
                assert worker.wait() == -signal.SIGKILL, worker.output
        assert life(0, "never").wait() == 0
        assert job.servers[-1].wait() == 0
        assert job.weights() == undisturbed.weights()
        assert_same_metrics(job, undisturbed)
        attempts = [row["attempts"] for row in job.query("SELECT attempts FROM episodes")]
        assert sum(attempts) - len(attempts) == 6, "only deaths between a claim and its end cost an attempt"


@pytest.mark.slow
def test_a_server_that_is_killed_while_an_environment_is_played_loses_and_doubles_nothing(tmp_path, fleet, undisturbed):
    faults = ("after_claim_commit:2", "after_chat_commit:3", "before_end_commit:3", "before_publish:1")
    with Job(tmp_path / "job", SHORT) as job:
        for number, fault in enumerate(faults):
            server = job.start(*(["--resume"] if number else []), fault=fault)
            if number == 0:
                worker = fleet(job.url, "OWN:Echo", "--concurrency", 2)
            assert server.wait() == -signal.SIGKILL, server.output
        job.start("--resume")
        job.finish()
        assert worker.wait() == 0, worker.output
        assert job.weights() == undisturbed.weights()
        assert_same_metrics(job, undisturbed)


@pytest.mark.slow
def test_after_sigterm_the_open_episodes_are_finished_and_no_other_is_begun(tmp_path, fleet):
    with Job(tmp_path / "job", SCRIPTED) as job:
        job.start()
        worker = fleet(job.url, "OWN:Slow", "--concurrency", 2, "--drain-seconds", 60)
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "two episodes have begun")
        worker.send(signal.SIGTERM)
        (tmp_path / "release").touch()
        assert worker.wait() == 0, worker.output
        assert "2 episodes played, 0 failed" in worker.output
        states = [row["state"] for row in job.query("SELECT state FROM episodes")]
        assert states.count("completed") == 2
        assert "claimed" not in states


@pytest.mark.slow
def test_runners_of_a_job_are_replaced_and_end_with_it(tmp_path):
    with Job(tmp_path / "own", WALKS, tasks=(), validation=()) as own:
        own.start()
        own.finish()
        environment = WALKS["environment"] | {"runners": 2}
        slow = {"engine": WALKS["engine"] | {"delay_seconds": 0.05}, "environment": environment}
        with Job(tmp_path / "runners", WALKS | slow, tasks=(), validation=()) as job:
            server = job.start()
            with Plane(job.url) as plane:
                until(lambda: plane.status()["runners"] == 2 and plane.status()["workers"] == 2, "two runners play")
                until(lambda: plane.status()["step"] >= 1, "a step")
                first, second = psutil.Process(server.popen.pid).children()
                names = {row["worker_id"] for row in job.query("SELECT DISTINCT worker_id FROM episodes")} - {None}
                first.kill()
                until(lambda: not first.is_running(), "it is gone")
                until(lambda: ended(job), "its end is recorded")
                ((number, reason),) = ended(job)
                assert reason == "was killed by SIGKILL"
                (dead,) = [name for name in names if name.startswith(f"runner-{number}-")]
                # As a claim of it that was still on its way when it died.
                claim = {"request_id": "late", "worker_id": dead, "wait_seconds": 20.0}
                assert plane.post("/claim_episode", claim).json()["status"] == "claimed"
            job.finish()  # well before the lease of 120 s runs out
            assert not second.is_running()
            assert len(ended(job)) == 1
            assert job.weights() == own.weights()
            names = {row["worker_id"] for row in job.query("SELECT DISTINCT worker_id FROM episodes")}
            assert {name.rpartition("-")[0] for name in names} == {"runner-0", "runner-1"}


def ended(job: Job) -> list[tuple[int, str]]:
    """The runners that have died, and how."""
    died = (json.loads(row["data"]) for row in job.query("SELECT data FROM events WHERE kind = 'runner_died'"))
    return [(one["runner"], one["reason"]) for one in died]


@pytest.mark.slow
def test_runners_end_with_a_job_that_is_killed(tmp_path):
    delay = {"engine": WALKS["engine"] | {"delay_seconds": 0.2}}
    with Job(
        tmp_path, WALKS | delay | {"environment": WALKS["environment"] | {"runners": 1}}, tasks=(), validation=()
    ) as job:
        server = job.start()
        with Plane(job.url) as plane:
            until(lambda: plane.status()["workers"] == 1, "the runner plays")
        (runner,) = psutil.Process(server.popen.pid).children()
        server.kill()
        until(lambda: not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE, "it has ended")


@pytest.mark.slow
def test_what_the_server_refuses_is_said_in_one_line(tmp_path, fleet):
    """What can be known without a server is in `unit/cli/test_worker.py`."""
    with Job(tmp_path / "job", SCRIPTED) as job:
        job.start()
        key = tmp_path / "key"
        key.write_text("wrong-key\n")
        refused = [
            (fleet(job.url, "OWN:Thinks", "--processes", 2), "the job names no environment"),
            (fleet(job.url, "OWN:Echo", "--processes", 2, "--key-file", key), "unknown key"),
        ]
        for worker, said in refused:
            assert worker.wait() == 2, worker.output
            assert said in worker.output
            assert worker.output.count("\n") == 1, worker.output
            assert "wrong-key" not in worker.output


def test_a_process_that_plays_loads_neither_torch_nor_ray():
    code = (
        "import sys, palestra.runtime.runner_fleet, palestra.cli.worker\n"
        "found = {'torch', 'transformers', 'ray', 'fastapi'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_an_evaluation_plays_in_its_own_process(tmp_path):
    environment = {"name": "calculator", "validation_tasks": 3, "runners": 2}
    config = parse_config({"engine": {"kind": "fake"}, "run_dir": str(tmp_path), "environment": environment})
    assert len(palestra.evaluate(config=config).outcomes) == 3
