"""The trial is the job itself for two steps, with a model that stays as it is."""

from __future__ import annotations

import time
from queue import SimpleQueue

import openai
import pytest

from palestra import Environment
from palestra.config import parse_config
from palestra.errors import ModelError
from palestra.models.catalog import model_folder
from palestra_inspect import trial
from palestra_inspect.trial import try_steps

pytestmark = pytest.mark.ci


def job(tmp_path, **settings):
    base = {"engine": {"kind": "fake"}, "run_dir": str(tmp_path / "run"), "rollout": {"group_size": 4}}
    return parse_config(base | settings)


def test_two_steps_are_measured_and_leave_nothing(tmp_path):
    lines = []
    found = try_steps(job(tmp_path, environment={"name": "arithmetic"}), lines.append, 60.0)
    assert [row["step"] for row in found.rows] == [1, 2]
    assert (found.stopped, found.stand_in) == (False, False)
    assert found.calls == found.episodes == sum(row["train/episodes"] for row in found.rows)
    assert found.completion_tokens == sum(row["rollout/completion_tokens"] for row in found.rows)
    assert found.memory_bytes > 10**7
    assert found.checkpoint_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert any("step 2 of 2" in line for line in lines)


def test_what_was_measured_is_returned_when_others_end_the_trial(tmp_path):
    end = SimpleQueue[None]()

    def rollout(task, endpoint):
        ai = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        for _ in range(1000):
            ai.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": "go on"}])
            end.put(None)
        return 1.0

    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n')
    config = job(tmp_path, tasks={"train": str(tmp_path / "tasks.jsonl")}, policies={"p": {"max_context": 10**6}})
    found = try_steps(config, lambda line: None, 60.0, rollout, end)
    assert (found.stopped, found.rows, found.episodes) == (True, [], 0)
    assert found.completion_tokens > found.calls > 0
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.slow
def test_a_trial_whose_event_loop_is_blocked_is_left_behind(tmp_path, monkeypatch):
    end, ended = SimpleQueue[None](), list[float]()

    class Blocking(Environment):
        blocking = False

        def reset(self, task):
            ended.append(time.monotonic())
            end.put(None)
            time.sleep(trial.CLOSE_SECONDS + 10.0)
            return "?", {}

        def step(self, action):
            return "", 1.0, True, False, {}

    monkeypatch.setattr(trial, "_StandIn", Blocking)
    found = try_steps(job(tmp_path), lambda line: None, 60.0, end=end)
    assert time.monotonic() - ended[0] < trial.CLOSE_SECONDS + 5.0
    assert (found.stopped, found.rows) == (True, [])


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_two_steps_of_a_trial_change_no_weight(tmp_path, monkeypatch, adapter):
    import safetensors.torch
    import torch

    settings = {"model": "tiny-random", "max_context": 512, "sampling": {"max_tokens": 8}}
    policy = settings | ({"adapter": {"rank": 2}} if adapter else {})
    (tmp_path / "trial").mkdir()
    monkeypatch.setattr(trial, "in_new_folder", lambda parent, prefix, work: work(tmp_path / "trial"))
    found = try_steps(job(tmp_path, engine={}, policies={"policy": policy}), lambda line: None, 100.0)
    assert [row["train/grad_norm"] > 0 for row in found.rows] == [True, True]
    (file,) = (tmp_path / "trial").glob(f"run/checkpoints/step-000002/{'adapter_' if adapter else ''}model.safetensors")
    after = safetensors.torch.load_file(file)
    if adapter:
        grown = [tensor for name, tensor in after.items() if "lora_B" in name]
        assert grown
        assert not any(tensor.any() for tensor in grown)
        return
    before = safetensors.torch.load_file(model_folder("tiny-random") / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_function_of_the_users_plays_the_episodes(tmp_path):
    seen = []

    def rollout(task, endpoint):  # blocks, as a sync client does
        ai = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        for _ in range(2):
            ai.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": task["prompt"]}])
        seen.append(task["prompt"])
        return float(len(seen) % 2)

    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    config = job(tmp_path, tasks={"train": str(tmp_path / "tasks.jsonl")})
    found = try_steps(config, lambda line: None, 60.0, rollout)
    assert len(found.rows) == 2
    assert found.calls == 2 * found.episodes
    assert set(seen) == {"one", "two"}


def test_an_error_of_the_users_function_ends_the_trial(tmp_path):
    def rollout(task, endpoint):
        raise RuntimeError("a bug of mine")

    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n')
    config = job(tmp_path, tasks={"train": str(tmp_path / "tasks.jsonl")}, rollout={"max_attempts": 9})
    with pytest.raises(RuntimeError, match=r"bug.*mine"):
        try_steps(config, lambda line: None, 60.0, rollout)


def test_a_question_stands_in_for_an_agent_outside(tmp_path):
    found = try_steps(job(tmp_path), lambda line: None, 60.0)
    assert found.stand_in
    assert len(found.rows) == 2


def test_a_model_that_can_not_be_loaded_is_an_error(tmp_path):
    with pytest.raises(ModelError):
        try_steps(parse_config({"model": "./nowhere", "run_dir": str(tmp_path / "run")}), lambda line: None, 60.0)
    serves = {"model": "./nowhere", "kind": "inference", "run_dir": str(tmp_path / "run")}
    with pytest.raises(ModelError):
        try_steps(parse_config(serves), lambda line: None, 60.0)
