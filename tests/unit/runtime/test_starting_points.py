"""Which settings an evaluation takes over from a run."""

from __future__ import annotations

import pytest

from palestra.config import JobConfig, dump_saved_config, name_settings
from palestra.runtime.starting_points import config_of_run, run_of

SAMPLED = {"model": "tiny-random", "max_context": 64, "sampling": {"max_tokens": 12, "temperature": 0.7}}


@pytest.fixture
def run(tmp_path):
    def saved(**settings):
        config = JobConfig.model_validate({"policies": {"calculator": SAMPLED}} | settings)
        (tmp_path / "run.db").touch()
        (tmp_path / "config.toml").write_text(dump_saved_config(config))
        (tmp_path / "checkpoints").mkdir()
        return tmp_path

    return saved


@pytest.mark.parametrize("place", [".", "checkpoints/step-000030"])
def test_prompt_limits_and_sampling_are_those_of_the_run(run, place):
    folder = run(
        run_dir="elsewhere",
        tracking=["tensorboard"],
        seats={"roles": ["buyer"]},
        environment={"system": "You are a calculator."},
        rollout={"timeout_seconds": 9.0},
    )
    found = config_of_run(str(folder / place))
    assert found.policies["calculator"].sampling.max_tokens == 12
    assert found.policies["calculator"].max_context == 64
    assert found.environment.system == "You are a calculator."
    assert found.rollout.timeout_seconds == 9.0
    assert (found.run_dir, found.tracking, list(found.seats.roles)) == (None, [], [])
    text = name_settings(found)
    assert "environment.system = 'You are a calculator.'" in text
    assert "policies.calculator.sampling.max_tokens = 12" in text
    assert "\n" not in text


def test_what_the_caller_says_comes_first(run):
    folder = run(environment={"name": "gomoku", "settings": {"size": 5}})
    said = {"policies.calculator.sampling.max_tokens": 7, "environment.settings.size": 6}
    assert config_of_run(str(folder)).environment.settings == {}
    assert config_of_run(str(folder)).environment.name is None
    assert config_of_run(str(folder), "gomoku").environment.settings == {"size": 5}
    assert config_of_run(str(folder), "gomoku-duel").environment.settings == {}
    found = config_of_run(str(folder), "gomoku-duel", said)
    assert found.environment.settings == {"size": 6}
    assert found.policies["calculator"].sampling.max_tokens == 7


def test_a_checkpoint_of_one_of_several_policies_is_scored_alone(run):
    folder = run(policies={"white": SAMPLED, "black": {"model": "tiny-random"}}, roles={"a": "white", "b": "black"})
    found = config_of_run(str(folder / "checkpoints" / "white" / "step-000002"))
    assert (list(found.policies), found.roles) == (["white"], {})
    assert found.policies["white"].sampling.max_tokens == 12
    assert list(config_of_run(str(folder)).policies) == ["white", "black"]


def test_what_is_of_no_run_brings_no_settings(run, tmp_path):
    folder = run()
    assert run_of(str(folder)) == folder
    for other in ("tiny-random", str(tmp_path / "other"), str(folder.parent)):
        assert config_of_run(other) is None
    assert name_settings(JobConfig()) == ""


def test_servers_that_may_work_for_the_run_are_left_alone(run):
    folder = run(engine={"kind": "vllm", "url": "http://127.0.0.1:8000"}, environment={"name": "gomoku"})
    assert config_of_run(str(folder), "gomoku").engine.urls == ()


def test_the_tasks_of_a_run_are_for_what_it_has_played(run, tmp_path):
    folder = run(tasks={"validation": str(tmp_path / "v.jsonl")}, environment={"name": "gomoku"})
    assert config_of_run(str(folder), "gomoku").tasks.validation == tmp_path / "v.jsonl"
    assert config_of_run(str(folder), "gomoku-duel").tasks.validation is None
