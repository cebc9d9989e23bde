from __future__ import annotations

from pathlib import Path

import pytest

import palestra
from palestra.envs import Gomoku
from palestra.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"tasks": "train.jsonl"},
            "`tasks` is a list of JSON objects, not 'train.jsonl'; a file is named in tasks.train",
        ),
        ({"validation_tasks": Path("held.jsonl")}, "not 'held.jsonl'; a file is named in tasks.validation"),
        ({"tasks": {"a": 1}}, "`tasks` is a list of JSON objects, not one object; write [{…}]"),
        ({"config": {"steps": 3}}, "the configuration is a dict; write palestra.JobConfig(steps=30, …)"),
        (
            {"rollout": Gomoku},
            "Gomoku is an environment, not a rollout function; give palestra.Play(environment=Gomoku)",
        ),
        ({"rollout": Gomoku()}, "give palestra.Play(environment=Gomoku)"),
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_loaded(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        palestra.train(**({"rollout": lambda task, policy: 1.0, "tasks": [{"a": 1}]} | arguments))
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())
