"""Why earlier attempts failed, in `palestra episodes`; a reward function for `palestra train` and `eval`."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.config import dump_config, parse_config
from palestra.runtime import evaluating, training
from palestra.runtime.job_thread import Interrupts, TrainResult
from palestra.types.records import Task
from unit.building import open_store
from unit.store.playing import claim, end


@pytest.fixture
async def run(tmp_path):
    """A run with an episode that failed once, and one that was good at the first attempt."""
    config = parse_config({"name": "tried", "engine": {"kind": "fake"}, "run_dir": str(tmp_path / "run")})
    with open_store(tmp_path / "run") as store:
        await store.groups.register("train", 0, 1, Task(task_id="t", data={}), 2)
        first = await claim(store, "a")
        await store.episodes.abort(first.episode_id, first.fence, "the tool did not\nanswer", False)
        for request in ("b", "c"):
            await end(store, await claim(store, request), metadata={"turns": 2})
    (tmp_path / "run" / "config.toml").write_text(dump_config(config))
    return tmp_path / "run"


async def test_the_list_says_why_the_attempt_before_failed(run, capsys):
    main(["episodes", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("turns=2; an earlier attempt failed: the tool did not answer")
    assert lines[2].endswith("turns=2")


async def test_an_episode_says_why_its_attempt_before_failed(run, capsys):
    main(["episodes", str(run), "train-000000-00"])
    assert "an earlier attempt failed: the tool did not\nanswer" in capsys.readouterr().out
    main(["episodes", str(run), "train-000000-01"])
    assert "failed" not in capsys.readouterr().out


@pytest.fixture
def scored(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(task, answer):\n    return 0.5\n")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    return tmp_path


def test_a_reward_function_can_be_named_for_training(scored, monkeypatch):
    given = {}

    def train(play, tasks, config, **others):
        given.update(rollout=play.rollout, reward=play.reward, train=config.tasks.train)
        return TrainResult(state="completed", run_dir=scored, metrics=[], checkpoints={}), Interrupts(lambda: True)

    monkeypatch.setattr(training, "train_until_stopped", train)
    assert main(["train", "--reward", "rewards.py:score", "--tasks", "tasks.jsonl"]) == 0
    assert given["rollout"] is None
    assert given["reward"]({}, "") == 0.5
    assert given["train"] == Path("tasks.jsonl")


def test_a_reward_function_can_be_named_for_an_evaluation(scored, monkeypatch):
    given = {}

    def score(play, tasks, config, **others):
        given.update(rollout=play.rollout, reward=play.reward)
        return evaluating.Evaluation(outcomes=(), complete=True), Interrupts(lambda: True)

    monkeypatch.setattr(evaluating, "evaluate_until_stopped", score)
    assert main(["eval", "tiny-random", "tasks.jsonl", "--reward", "rewards.py:score"]) == 0
    assert given["rollout"] is None
    assert given["reward"]({}, "") == 0.5


def test_tasks_without_a_text_are_refused_before_anything_is_loaded(scored, capsys):
    (scored / "tasks.jsonl").write_text('{"question": "?"}\n')
    assert main(["train", "--reward", "rewards.py:score", "--tasks", "tasks.jsonl"]) == 2
    assert "tasks.jsonl:1: " in capsys.readouterr().err
    assert main(["train", "--tasks", "tasks.jsonl"]) == 2
    assert "nothing says what is played" in capsys.readouterr().err
