from __future__ import annotations

from pathlib import Path

import pytest

import palestra
from palestra import JobConfig
from palestra.envs import Gomoku
from palestra.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": "train.jsonl"}, "tasks file train.jsonl: No such file"),
        ({"validation_tasks": Path("held.jsonl")}, "tasks file held.jsonl: No such file"),
        ({"tasks": {"a": 1}}, "`tasks` is one dict, not several tasks; write [{…}]"),
        ({"tasks": 3}, "`tasks` has the type int; give a list of JSON objects"),
        ({"config": {"steps": 3}}, "the configuration is a dict; write palestra.JobConfig(steps=30, …)"),
        ({"rollout": Gomoku}, "Gomoku is an environment, not a rollout function; give environment=Gomoku"),
        ({"rollout": Gomoku()}, "give environment=Gomoku"),
        ({"rollout": 3}, "`rollout` has the type int; give a function"),
        ({"rollout": None}, "nothing says what is played"),
        ({"environment": Gomoku}, "said more than once, by rollout and environment;"),
        ({"environment": "gomoku"}, "said more than once, by rollout and environment.name = 'gomoku'"),
        (
            {"rollout": None, "environment": Gomoku()},
            "each episode needs its own; give the class Gomoku, or `lambda: Gomoku(…)`",
        ),
        ({"rollout": None, "reward": 3}, "`reward` has the type int; give a function"),
        ({"rollout": None, "reward": len}, "`tasks`, task 0: the task has no key `prompt`; it has 'a'"),
        (
            {
                "rollout": None,
                "reward": len,
                "tasks": [{"prompt": "?"}, {"prompt": [{"role": "user", "content": "?"}]}],
            },
            "`tasks`, task 1: the task's `prompt` has the type list, and is asked as one message of the user",
        ),
        (
            {"rollout": None, "reward": len, "tasks": [{"prompt": "?"}], "validation_tasks": [{}]},
            "`validation_tasks`, task 0: the task has no key `prompt`",
        ),
        ({"model": 3}, "`model` has the type int; give the name of a model"),
        ({"model": ""}, "PolicyConfig: model: String should have at least 1 character"),
        (
            {"rollout": None, "environment": "gomoku", "config": JobConfig(environment={"name": "calculator"})},
            "`environment` is 'gomoku', and environment.name is 'calculator'; leave one out",
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_loaded(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        palestra.train(**({"rollout": lambda task, policy: 1.0, "tasks": [{"a": 1}]} | arguments))
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())
