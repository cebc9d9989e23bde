"""A job whose trainer has two processes learns what a job of one process learns, also when one of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from unit.sharded.forked_ranks import import_everything, start_forked

import palestra
from palestra import JobConfig
from palestra_sharded.trainer import ShardedTrainer

PROGRAM = "palestra_sharded.processes"
TASKS = [{"prompt": f"say {i}"} for i in range(6)]


def config(folder, devices, steps=3, deterministic=False, **trainer):
    return JobConfig.model_validate(
        {
            "name": "sharded",
            "deterministic": deterministic,
            "steps": steps,
            "run_dir": str(folder),
            "policies": {
                "policy": {
                    "model": "tiny-random",
                    "max_context": 256,
                    "sampling": {"max_tokens": 8},
                    "optimizer": {"learning_rate": 1e-3},
                }
            },
            "rollout": {"group_size": 4, "groups_per_step": 2},
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": 1},
            "engine": {"threads": 1, "dtype": "float32"},
            "trainer": {"threads": 1, "dtype": "float32", "devices": devices} | trainer,
        }
    )


def reward(task, answer):
    return float(len(answer) % 3)


def ranks_of(process: int) -> list[int]:
    """The ids of the rank processes that a process has started, and that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, status = (folder / "cmdline").read_bytes().split(b"\0"), (folder / "stat").read_text()
        except OSError:  # it has ended meanwhile
            continue
        state, parent = status.rpartition(")")[2].split()[:2]
        if PROGRAM.encode() in words and (int(parent) == process or process == 0) and state != "Z":
            found.append(int(folder.name))
    return sorted(found)


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns_also_when_one_is_killed(tmp_path):
    one = palestra.train(reward=reward, tasks=TASKS, config=config(tmp_path / "one", 1), quiet=True)
    answers, killed = [], []

    def deadly(task, answer):
        answers.append(answer)
        if len(answers) == 12:  # of eight in a step
            killed.append(ranks_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)
        return reward(task, answer)

    two = palestra.train(reward=deadly, tasks=TASKS, config=config(tmp_path / "two", 2), quiet=True)
    assert (one.state, two.state) == ("completed", "completed")
    assert killed
    assert not ranks_of(os.getpid())
    assert len(two.metrics) == len(one.metrics)
    for ours, theirs in zip(two.metrics, one.metrics, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/reward_mean", "train/entropy", "rollout/sampled_tokens"):
            assert ours.get(key) == pytest.approx(theirs.get(key), rel=1e-3, abs=1e-5)
    with contextlib.closing(sqlite3.connect(tmp_path / "two" / "run.db")) as store:
        ((lost,),) = store.execute("SELECT data FROM events WHERE kind = 'trainer_lost'")
    assert "rank 0 was killed by SIGKILL" in lost


class Timer:
    """Takes the time of each request to the ranks, and hurts one in the middle of some."""

    def __init__(self, monkeypatch, hurt: dict[str, int], sent: signal.Signals, seconds: dict[str, float]) -> None:
        """`hurt`: at which call of a method; `seconds`: that the method takes at least."""
        self.taken: dict[str, list[float]] = {"forward_backward": [], "optim_step": [], "save": []}
        self.failed: dict[str, bool] = {}
        for name in self.taken:
            monkeypatch.setattr(ShardedTrainer, name, self._timed(name, hurt.get(name), sent, seconds.get(name, 0.0)))

    def _timed(self, name, number, sent, seconds):
        method, taken = getattr(ShardedTrainer, name), self.taken[name]

        async def timed(trainer, *given, **named):
            is_hurt = len(taken) + 1 == number and name not in self.failed
            if is_hurt:
                self.failed[name] = True
                threading.Timer(seconds / 3, os.kill, (trainer.pids[len(self.failed) % 2], sent)).start()
            start = time.monotonic()
            found = await method(trainer, *given, **named)
            taken.append(time.monotonic() - start)
            self.failed |= {name: False} if is_hurt else {}
            return found

        return timed


def weights_of(folder: Path):
    return load_file(max((folder / "checkpoints").glob("step-*")) / "model.safetensors")


def metrics_of(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    differs = ("time/", "wall_seconds", "rollout/tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(differs)} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_are_hurt_in_the_middle_of_requests_leave_a_job_with_the_same_bits(tmp_path):
    """The second gradient, the third update and the fourth checkpoint: killed, or stopped, in the middle."""
    told = {"steps": 5, "deterministic": True, "stuck_seconds": 10.0}
    import_everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palestra_sharded.trainer.start_process", start_forked)
        calm = Timer(patch, {}, signal.SIGKILL, {})
        palestra.train(reward=reward, tasks=TASKS, config=config(tmp_path / "calm", 2, **told), quiet=True)
    seconds = {name: min(taken) for name, taken in calm.taken.items()}
    for sent, said in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has been silent for")):
        folder = tmp_path / sent.name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("palestra_sharded.trainer.start_process", start_forked)
            hurt = Timer(patch, {"forward_backward": 2, "optim_step": 3, "save": 4}, sent, seconds)
            result = palestra.train(reward=reward, tasks=TASKS, config=config(folder, 2, **told), quiet=True)
        assert result.state == "completed"
        assert hurt.failed.keys() == hurt.taken.keys()
        assert hurt.failed["forward_backward"], "a third of the shortest time is in the middle"
        with contextlib.closing(sqlite3.connect(folder / "run.db")) as store:
            lost = [data for (data,) in store.execute("SELECT data FROM events WHERE kind = 'trainer_lost'")]
        assert len(lost) == 3
        assert all(said in data for data in lost)
        assert metrics_of(folder) == metrics_of(tmp_path / "calm")
        found, wanted = weights_of(folder), weights_of(tmp_path / "calm")
        assert found.keys() == wanted.keys()
        assert all((found[name] == wanted[name]).all() for name in wanted), "bit for bit"
