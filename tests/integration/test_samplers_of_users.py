"""`palestra.train(sampler=…)`: a whole job with the fake engine plays the tasks that a user's class chooses."""

from __future__ import annotations

import random

import pytest

import palestra
from palestra import JobConfig
from palestra.errors import ConfigError, InvalidSampler

TASKS = [{"id": f"t{n}", "prompt": "?"} for n in range(5)]


class Alternating(palestra.TaskSampler):
    """Plays a task again that was solved, and else the next one."""

    def tasks(self, step, history):
        solved = [group.position for group in history.results if sum(group.rewards)]
        yield from solved[-1:]
        while True:
            yield step % len(self.pool)
            step += 1


class Unseeded(palestra.TaskSampler):
    def tasks(self, step, history):
        while True:
            yield random.randrange(len(self.pool))


def settings(folder, **changes) -> JobConfig:
    rollout = {"group_size": 2, "groups_per_step": 2}
    job = {"run_dir": folder, "steps": 3, "engine": {"kind": "fake"}, "rollout": rollout}
    return JobConfig.model_validate(job | {"evaluation": {"every_steps": 0}} | changes)


def reward(task, answer):
    return float(task["id"] == "t2")


@pytest.mark.slow
def test_a_users_sampler_chooses_the_tasks_from_the_results_also_after_a_resume(tmp_path):
    def play(**changes) -> None:
        config = settings(tmp_path / "run", **changes)
        palestra.train(reward=reward, tasks=TASKS, config=config, sampler=Alternating, quiet=True, resume=bool(changes))

    play()
    play(steps=4)
    played = palestra.read_episodes(tmp_path / "run")
    names = [[each.task_id for each in played if each.group_index == group] for group in range(8)]
    assert names == [[name] * 2 for name in ["t1", "t2", "t2", "t2", "t2", "t3", "t2", "t4"]]


@pytest.mark.slow
def test_a_sampler_that_is_not_deterministic_fails_the_job_before_an_episode(tmp_path):
    with pytest.raises(InvalidSampler):
        palestra.train(reward=reward, tasks=TASKS, config=settings(tmp_path / "run"), sampler=Unseeded, quiet=True)
    assert not list(palestra.read_episodes(tmp_path / "run"))


@pytest.mark.parametrize(
    ("sampler", "changes"),
    [
        (42, {}),
        (Alternating, {"curriculum": {}}),
        (Alternating, {"algorithm": {"name": "sft", "from_run": "earlier"}}),
    ],
)
def test_a_sampler_that_would_not_choose_is_refused_before_anything_is_loaded(sampler, changes, tmp_path):
    config = settings(tmp_path / "run", **changes)
    reads = {} if "algorithm" in changes else {"reward": reward, "tasks": TASKS}
    with pytest.raises(ConfigError, match="`sampler`"):
        palestra.train(config=config, sampler=sampler, quiet=True, **reads)
    assert not (tmp_path / "run").exists()
