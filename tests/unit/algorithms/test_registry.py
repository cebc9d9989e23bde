"""Algorithms by name, and the border that code of a user does not cross."""

from __future__ import annotations

import sys

import pytest

from palestra.algorithms.base import Algorithm
from palestra.algorithms.grpo import GRPO
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import AlgorithmConfig
from palestra.errors import ConfigError


def test_a_name_is_an_algorithm_with_the_jobs_settings():
    config = AlgorithmConfig(name="grpo", clip_low=0.1)
    made = create_algorithm(config, "acted")
    assert type(made) is ALGORITHMS["grpo"] is GRPO
    assert (made.config, made.step_order) == (config, "acted")
    assert made.loss().parameters == {"clip_low": 0.1, "clip_high": 0.2}


def test_an_unknown_name_is_told_with_the_nearest_one():
    with pytest.raises(ConfigError, match="which is no algorithm; did you mean 'grpo'"):
        create_algorithm(AlgorithmConfig(name="gpro"))
    with pytest.raises(ConfigError, match="known: grpo"):
        create_algorithm(AlgorithmConfig(name="zzz"))


@pytest.mark.parametrize("name", ["", ":", "a:", ":B", "a b:C", "../a:B", "a:B:C", "a/b:C", "grpo\n", "os:system('x')"])
def test_what_is_no_name_is_refused_by_the_configuration(name):
    with pytest.raises(ConfigError):
        AlgorithmConfig(name=name)


def test_code_of_ones_own_is_imported_only_where_it_is_allowed():
    name = "unit.algorithms.own_algorithm:Surprise"
    sys.modules.pop("unit.algorithms.own_algorithm", None)
    with pytest.raises(ConfigError, match=r"only where you call palestra\.train yourself"):
        create_algorithm(AlgorithmConfig(name=name))
    assert "unit.algorithms.own_algorithm" not in sys.modules
    made = create_algorithm(AlgorithmConfig(name=name), own_code=True)
    assert isinstance(made, Algorithm)
    assert made.loss().name == "surprise"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:A", "can't be imported: No module named 'no_such_module'"),
        ("unit.algorithms.own_algorithm:Nothing", "can't be imported: .* has no attribute 'Nothing'"),
        ("unit.algorithms.own_algorithm:SurpriseLoss", "is no subclass of"),
    ],
)
def test_a_class_that_is_none_is_told(name, said):
    with pytest.raises(ConfigError, match=said):
        create_algorithm(AlgorithmConfig(name=name), own_code=True)
