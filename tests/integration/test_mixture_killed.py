"""A real job with three environments, a curriculum and dynamic sampling draws the same tasks, however often it dies."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from integration.mixture_process import settings

from palestra import JobConfig, read_episodes, train

STEPS = 6


def groups_in(folder: Path) -> list[tuple[int, int, str, str]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute(
            "SELECT group_index, step, task_id, state FROM groups WHERE kind = 'train' ORDER BY group_index"
        ).fetchall()


def run_killed(folder: Path, kills: int) -> None:
    """Run the job in a process that is killed each time when it has registered some more groups."""
    for number in range(kills + 1):
        words = [sys.executable, str(Path(__file__).with_name("mixture_process.py")), str(folder), str(STEPS)]
        process = subprocess.Popen([*words, "resume" if number else "new"])
        if number == kills:
            assert process.wait(100) == 0
            return
        while process.poll() is None and _registered(folder) < 5 + 9 * number:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()


def _registered(folder: Path) -> int:
    try:
        return len(groups_in(folder))
    except sqlite3.Error:
        return 0


@pytest.mark.slow
def test_a_killed_job_draws_the_same_tasks_and_its_quotas_are_exact(tmp_path):
    train(config=settings(tmp_path / "whole", STEPS, 0.0), quiet=True)
    run_killed(tmp_path / "killed", 2)
    expected = groups_in(tmp_path / "whole")
    assert groups_in(tmp_path / "killed") == expected
    assert any(state == "skipped" for *_, state in expected), "dynamic sampling has replaced some"
    weights, played = {"sums": 3, "letters": 2, "products": 1}, Counter[str]()
    for step in range(1, STEPS + 1):
        of_step = [task.partition("/")[0] for _, number, task, state in expected if number == step and state == "ready"]
        played.update(of_step)
        assert len(of_step) == 4
        assert all(abs(played[name] - weight / 6 * 4 * step) < 1 for name, weight in weights.items())
    kinds = {episode.task_id.partition("/")[0] for episode in read_episodes(tmp_path / "whole", "validation")}
    assert kinds == set(weights)


@pytest.mark.slow
def test_files_of_tasks_have_weights_and_a_reward_of_the_user_scores_them(tmp_path):
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "{name}"}}\n' for n in range(4)))
    environments = [
        {"id": "easy", "weight": 1, "tasks": {"train": tmp_path / "easy.jsonl"}},
        {"id": "hard", "weight": 3, "tasks": {"train": tmp_path / "hard.jsonl", "validation": tmp_path / "easy.jsonl"}},
    ]
    job = {"run_dir": tmp_path / "run", "steps": 2, "engine": {"kind": "fake"}, "environments": environments}
    config = JobConfig.model_validate(job | {"rollout": {"group_size": 2, "groups_per_step": 4}})
    result = train(reward=lambda task, answer: float(task["prompt"] == "hard"), config=config, quiet=True)
    assert Counter(task.partition("/")[0] for _, _, task, _ in groups_in(tmp_path / "run")) == {"easy": 2, "hard": 6}
    row = result.metrics[-1]
    assert (row["train/environments/easy/reward_mean"], row["train/environments/hard/reward_mean"]) == (0.0, 1.0)
    assert (row["train/environments/hard/groups"], row["validation/environments/hard/reward_mean"]) == (3.0, 0.0)
