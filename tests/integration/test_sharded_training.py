"""A job whose trainer has two processes learns what a job of one process learns, also when one of them is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import pytest

import palestra
from palestra import JobConfig

PROGRAM = "palestra.trainer.sharded.rank_process"
TASKS = [{"prompt": f"say {i}"} for i in range(6)]


def config(folder, devices, steps=3):
    return JobConfig.model_validate(
        {
            "name": "sharded",
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
            "trainer": {"threads": 1, "dtype": "float32", "devices": devices},
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
