"""`palestra worker`: real processes that crash, are stopped, and finish what they play."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from servers import HERE, PALESTRA, SCRIPTED, Job, Process, until

pytestmark = pytest.mark.slow
SHORT = SCRIPTED | {"rollout": {**SCRIPTED["rollout"], "lease_seconds": 1.0}}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_FOLDER", str(tmp_path))
    started = []

    def start(job: Job, function: str, *options: object) -> Process:
        command = [PALESTRA, "worker", f"{HERE / 'fleet_rollouts.py'}:{function}", "--url", job.url, *options]
        started.append(Process.start(command, job.folder / f"fleet-{len(started)}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_it_plays_until_the_job_is_over(tmp_path, fleet):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        worker = fleet(job, "rollout", "--processes", 2, "--concurrency", 3, "--name", "laptop")
        assert job.servers[-1].wait() == 0
        assert worker.wait() == 0, worker.output
        assert worker.output.count("episodes played") == 2
        names = {row["worker_id"] for row in job.query("SELECT worker_id FROM episodes")}
        assert all(name.startswith("laptop-") for name in names)


def test_a_child_that_dies_is_started_again_and_its_episode_is_played(tmp_path, fleet):
    lease = {
        "lease_seconds": 5.0
    }  # which a child keeps on a busy machine, too, so that only the dead one loses episodes
    with Job(tmp_path, SHORT | {"rollout": {**SHORT["rollout"], **lease}}) as job:
        job.start()
        worker = fleet(job, "crashes_once", "--concurrency", 2)
        assert job.servers[-1].wait() == 0
        assert worker.wait() == 0, worker.output
        assert "worker process 0 was killed by SIGKILL; started again" in worker.output
        assert max(row["attempts"] for row in job.query("SELECT attempts FROM episodes")) == 2


def test_children_that_only_die_end_the_command_with_the_reason(tmp_path, fleet):
    with Job(tmp_path, SHORT) as job:
        job.start()
        worker = fleet(job, "crashes")
        assert worker.wait() == 2
        assert "ended with code 9, one of 5 crashes within 60 s" in worker.output
        assert "Traceback" not in worker.output


def test_after_sigterm_what_is_played_is_finished_and_nothing_else_is_begun(tmp_path, fleet):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        worker = fleet(job, "slow", "--concurrency", 2, "--drain-seconds", 60)
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "two episodes have begun")
        children = children_of(worker.popen.pid)
        assert len(children) == 1
        worker.send(signal.SIGTERM)
        (tmp_path / "release").touch()
        assert worker.wait() == 0, worker.output
        assert "2 episodes played, 0 failed" in worker.output
        states = [row["state"] for row in job.query("SELECT state FROM episodes")]
        assert states.count("completed") == 2
        assert "claimed" not in states
        for pid in children:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_children_whose_parent_was_killed_finish_what_they_play_and_end(tmp_path, fleet):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        worker = fleet(job, "slow", "--concurrency", 2)
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "two episodes have begun")
        (child,) = children_of(worker.popen.pid)
        worker.send(signal.SIGKILL)
        (tmp_path / "release").touch()
        until(lambda: "2 episodes played, 0 failed" in worker.output, "the child has drained")
        until(lambda: not psutil.pid_exists(child), "the child has ended")


def test_what_does_not_finish_in_time_is_killed(tmp_path, fleet):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        worker = fleet(job, "slow", "--drain-seconds", 0.3)
        until(lambda: list(tmp_path.glob("begun-*")), "an episode has begun")
        children = children_of(worker.popen.pid)
        worker.send(signal.SIGTERM)
        assert worker.wait(20) == 1
        for pid in children:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_wrong_arguments_are_refused_in_words_and_no_key_is_shown(tmp_path, fleet):
    with Job(tmp_path, SCRIPTED) as job:
        job.start()
        for function, options, said in (
            ("rollout", ["--concurrency", 0], "at least 1"),
            ("missing", [], "has no 'missing'"),
            ("rollout", ["--key-file", tmp_path / "none"], "No such file"),
        ):
            worker = fleet(job, function, *options)
            assert worker.wait() == 2
            assert said in worker.output
        key = tmp_path / "key"
        key.write_text("wrong-key\n")
        worker = fleet(job, "rollout", "--key-file", key)
        assert worker.wait() == 2, worker.output
        assert "wrong-key" not in worker.output
