"""What users return in the place of a reward: it costs the episode, is named, and does not end the run by itself."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
from typing import ClassVar

import numpy as np
import pytest
import torch

import palestra
from palestra import JobConfig, RolloutResult, RolloutSpec
from palestra.cli.main import main
from palestra.client import worker
from palestra.envs import Environment
from palestra.errors import EpisodesLost, InvalidRequest, RolloutFailed
from palestra.runners import pool

pytestmark = pytest.mark.ci

TASKS = [{"id": f"task-{number}", "number": number} for number in range(4)]


def config(folder, **changes) -> JobConfig:
    return JobConfig.model_validate(
        {
            "run_dir": folder / "run",
            "steps": 2,
            "rollout": {"group_size": 3, "groups_per_step": 2},
            "engine": {"kind": "fake", "reply_tokens": 3},
            "evaluation": {"every_steps": 0},
        }
        | changes
    )


def episodes(folder) -> list[sqlite3.Row]:
    with sqlite3.connect(folder / "run" / "run.db") as db:
        db.row_factory = sqlite3.Row
        return db.execute("SELECT * FROM episodes").fetchall()


class Sometimes:
    """The first attempt at each task gives `value`, and all others a reward."""

    def __init__(self, value) -> None:
        self.value, self.seen, self.given = value, set(), 0

    def __call__(self, task, policy):
        if task["number"] in self.seen:
            return float(task["number"])
        self.seen.add(task["number"])
        self.given += 1
        return self.value


@pytest.mark.slow
@pytest.mark.parametrize("value", ["good", math.nan, math.inf, [1.0], {"a": math.nan}, object()])
def test_what_is_no_reward_costs_an_attempt_and_names_task_and_episode(tmp_path, value, caplog):
    rollout = Sometimes(value)
    result = palestra.train(rollout, TASKS, config(tmp_path), quiet=True, concurrency=1)
    assert result.state == "completed"
    told = [record.getMessage() for record in caplog.records if record.name == "palestra.worker"]
    assert len(told) == rollout.given > 0
    assert all("(task task-" in line and "a reward is a finite number, or None" in line for line in told)
    assert {row["attempts"] for row in episodes(tmp_path)} == {1, 2}


def test_a_run_of_nothing_but_bad_rewards_ends_after_as_many_as_of_other_failures(tmp_path):
    with pytest.raises(InvalidRequest, match=r"train-\d{6}-\d\d.*task-\d.*'good'"):
        palestra.train(lambda task, policy: "good", TASKS, config(tmp_path), quiet=True, concurrency=1)
    failed = [row for row in episodes(tmp_path) if row["reason"]]
    assert sum(row["attempts"] for row in failed) == worker.FAILURES_IN_A_ROW == pool.FAILURES_IN_A_ROW


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, {"a": 1.0, "b": None}, RolloutResult(reward=None)])
def test_none_leaves_the_episode_out_once_and_for_all(tmp_path, value):
    rollout = Sometimes(value)
    result = palestra.train(rollout, TASKS, config(tmp_path), quiet=True, concurrency=1)
    left_out = [row for row in episodes(tmp_path) if row["state"] == "discarded"]
    assert len(left_out) == rollout.given > 0
    assert {(row["attempts"], row["reason"].partition(":")[0]) for row in left_out} == {(1, "not_scored")}
    assert sum(row["train/episodes_discarded"] for row in result.metrics if "train/episodes" in row) == len(left_out)
    assert all(row["rewards"] is None for row in left_out)


@pytest.mark.slow
def test_where_nothing_is_scored_the_run_ends_by_the_rule_for_dropped_groups(tmp_path):
    with pytest.raises(EpisodesLost, match=r"<lambda>.*None"):
        palestra.train(lambda task, policy: None, TASKS, config(tmp_path), quiet=True, concurrency=1)
    assert {row["attempts"] for row in episodes(tmp_path)} <= {0, 1}


def test_numbers_of_all_kinds_are_rewards(tmp_path):
    values = [True, 1, np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0), {"a": np.int64(1)}]
    left = list(values)

    def rollout(task, policy):
        return left.pop() if left else 1.0

    palestra.train(rollout, TASKS, config(tmp_path), quiet=True, concurrency=1)
    assert not left
    rewarded = [json.loads(row["rewards"]) for row in episodes(tmp_path) if row["state"] == "completed"]
    assert len(rewarded) > len(values)
    assert all(sum(rewards.values()) == 1.0 for rewards in rewarded)
    assert {"a": 1.0} in rewarded
    assert {row["attempts"] for row in episodes(tmp_path)} <= {0, 1}


def test_the_line_of_the_users_file_is_named(tmp_path, caplog):
    def rollout(task, policy):
        if rollout.attempts < 2:
            rollout.attempts += 1
            return task["answer"]
        return 1.0

    rollout.attempts = 0
    palestra.train(rollout, TASKS, config(tmp_path, steps=1), quiet=True, concurrency=1)
    line = rollout.__code__.co_firstlineno + 3
    told = [record.getMessage() for record in caplog.records if record.name == "palestra.worker"]
    assert len(told) == 2
    assert all(entry.endswith(f"failed: KeyError: 'answer' (test_rewards.py:{line}, in rollout)") for entry in told)


class Scored(Environment):
    """Its reward is what the first attempts at a task are to get, and then 1."""

    blocking = False
    value: object = None
    seen: ClassVar[set[int]] = set()

    def reset(self, task):
        self.number = task["number"]
        return "say", {}

    def step(self, action):
        first = self.number not in self.seen
        self.seen.add(self.number)
        return "", self.value if first else 1.0, True, False, {}


def scored(value: object) -> type[Scored]:
    return type("ScoredOnce", (Scored,), {"value": value, "seen": set()})


def test_an_environment_that_gives_none_leaves_the_episode_out(tmp_path):
    palestra.train(RolloutSpec(environment=scored(None)), TASKS, config(tmp_path), quiet=True, concurrency=1)
    left_out = [row for row in episodes(tmp_path) if row["state"] == "discarded"]
    assert left_out
    assert {(row["attempts"], row["reason"].partition(":")[0]) for row in left_out} == {(1, "not_scored")}


@pytest.mark.slow
def test_an_environment_with_a_bad_reward_fails_its_episode(tmp_path, caplog):
    palestra.train(RolloutSpec(environment=scored("good")), TASKS, config(tmp_path), quiet=True, concurrency=1)
    told = [r.getMessage() for r in caplog.records if r.name == "palestra.rollout" and r.levelno == logging.WARNING]
    assert told
    assert all("(task task-" in line and "step returned 'good', which is no reward" in line for line in told)
    assert {row["state"] for row in episodes(tmp_path)} == {"completed"}


def test_an_environment_with_nothing_else_ends_the_run(tmp_path):
    class Bad(Scored):
        def step(self, action):
            return "", "good", True, False, {}

    with pytest.raises(RolloutFailed, match=r"20.*train-\d+-\d+.*task-\d"):
        palestra.train(RolloutSpec(environment=Bad), TASKS, config(tmp_path), quiet=True, concurrency=1)


def test_tasks_that_are_no_objects_are_named_before_anything_is_loaded(tmp_path):
    with pytest.raises(InvalidRequest, match=r"JSON.*0.*str"):
        palestra.train(lambda task, policy: 1.0, ["what is 2 + 2"], config(tmp_path), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_calls_the_model_says_so(tmp_path, capsys):
    result = palestra.train(lambda task, policy: 1.0, TASKS, config(tmp_path, steps=1))
    assert result.metrics[-1]["train/episodes_without_tokens"] == 6
    assert "warning: 6 of 6 episodes of step 1 never called the model" in capsys.readouterr().out.replace("\n", " ")


def test_named_rewards_of_a_rollout_are_kept_weighed_and_measured(tmp_path):
    def rollout(task, policy):
        return RolloutResult(named_rewards={"right": True, "length": 4, "style": None})

    weighed = config(tmp_path, steps=1, algorithm={"reward_weights": {"length": -0.25}})
    result = palestra.train(rollout, TASKS, weighed, quiet=True)
    for row in episodes(tmp_path):
        assert json.loads(row["rewards"]) == {"agent": 0.0}
        assert json.loads(row["named_rewards"]) == {"right": 1.0, "length": 4.0, "style": None}
    last = result.metrics[-1]
    assert (last["train/rewards/right"], last["train/rewards/length"], last["train/reward_mean"]) == (1.0, 4.0, 0.0)
    assert "train/rewards/style" not in last


def test_a_rollout_of_which_no_named_reward_is_scored_is_left_out(tmp_path):
    rollout = Sometimes(RolloutResult(named_rewards={"right": None, "style": None}))
    palestra.train(rollout, TASKS, config(tmp_path), quiet=True, concurrency=1)
    left_out = [row for row in episodes(tmp_path) if row["state"] == "discarded"]
    assert len(left_out) == rollout.given > 0
    assert {row["reason"].partition(":")[0] for row in left_out} == {"not_scored"}


def test_rewards_by_name_of_train_are_weighed_measured_and_none_is_no_zero(tmp_path):
    def style(task, answer):
        return None if task["number"] % 2 else 4.0

    tasks = [task | {"prompt": "say it"} for task in TASKS]
    settings = config(
        tmp_path,
        steps=1,
        rollout={"group_size": 2, "groups_per_step": 4},
        algorithm={"reward_weights": {"style": 0.5}},
        evaluation={"every_steps": 1},
    )
    rewards = {"right": lambda task, answer: 1.0, "style": style}
    held_out = [task | {"id": f"v {task['id']}"} for task in tasks]
    result = palestra.train(reward=rewards, tasks=tasks, validation_tasks=held_out, config=settings, quiet=True)
    row = result.metrics[-1]
    for split in ("train", "validation"):
        assert (row[f"{split}/rewards/right"], row[f"{split}/rewards/style"]) == (1.0, 4.0)
        assert row[f"{split}/reward_mean"] == 3.0, "not scored is as good as the others"
    found = [json.loads(row["named_rewards"]) for row in episodes(tmp_path)]
    assert {json.dumps(named) for named in found} == {
        '{"right": 1.0, "style": 4.0}',
        '{"right": 1.0, "style": null}',
    }


def test_an_environment_of_your_own_may_give_rewards_by_name(tmp_path):
    class Named(Environment):
        blocking = False

        def reset(self, task):
            return "?", {}

        def step(self, action):
            return "", {"right": 1.0, "short": None}, True, False, {}

    result = palestra.train(environment=Named, tasks=TASKS, config=config(tmp_path, steps=1), quiet=True)
    assert result.metrics[-1]["train/rewards/right"] == 1.0
    assert "train/rewards/short" not in result.metrics[-1]
    assert {row["named_rewards"] for row in episodes(tmp_path)} == {'{"right":1.0,"short":null}'}


def test_a_reward_function_that_fails_is_shown_with_one_traceback_and_by_the_doctor(tmp_path, caplog, capsys):
    def reward(task, answer):
        raise KeyError(task["prompt"])

    small = config(tmp_path, rollout={"group_size": 2, "groups_per_step": 1})
    with pytest.raises(EpisodesLost, match="KeyError"):
        palestra.train(reward=reward, tasks=[{"prompt": str(n)} for n in range(4)], config=small, quiet=True)
    lines = [record for record in caplog.records if "environment_failed" in record.getMessage()]
    assert len(lines) > 3
    assert [bool(record.exc_info and record.exc_info[0]) for record in lines] == [True] + [False] * (len(lines) - 1)
    assert main(["doctor", str(tmp_path / "run")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "no step is finished yet failed all 6 episodes of step 1 failed: KeyError: " in said
    assert f" all palestra episodes {tmp_path}" in said
    assert "in reward)" in said


def test_rewards_by_name_are_shown_with_the_episode(tmp_path, capsys):
    rewards = {"short": lambda task, answer: 0.25, "right": lambda task, answer: None}
    palestra.train(reward=rewards, tasks=[{"prompt": "?"}], config=config(tmp_path, steps=1), quiet=True)
    capsys.readouterr()
    main(["episodes", str(tmp_path / "run"), "train-000000-00"])
    assert "\nright not scored; short 0.25\n" in capsys.readouterr().out
    main(["episodes", str(tmp_path / "run"), "train-000000-00", "--json"])
    assert json.loads(capsys.readouterr().out)["named_rewards"] == {"right": None, "short": 0.25}
