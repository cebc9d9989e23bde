"""Algorithms by name, and the border that code of a user does not cross."""

from __future__ import annotations

import sys

import pytest

from palestra.algorithms.base import Algorithm
from palestra.algorithms.group_relative import GRPO
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import ALGORITHM_NAMES, GRPOConfig, OwnAlgorithmConfig, parse_config
from palestra.errors import ConfigError


def test_a_name_is_an_algorithm_with_the_jobs_settings():
    config = GRPOConfig(clip_low=0.1)
    made = create_algorithm(config, "acted")
    assert type(made) is ALGORITHMS["grpo"] is GRPO
    assert (made.config, made.step_order) == (config, "acted")
    assert made.loss().parameters == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}


def test_the_names_of_the_configuration_are_those_of_the_registry():
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES
    for name, algorithm in ALGORITHMS.items():
        config = parse_config({"algorithm": {"name": name}}).algorithm
        assert config.name == name
        assert type(create_algorithm(config)) is algorithm
        assert algorithm.about is not None


def test_an_unknown_name_is_told_with_the_nearest_one_and_the_list():
    with pytest.raises(ConfigError, match=r"'gpro'.*'grpo'.*dr_grpo"):
        parse_config({"algorithm": {"name": "gpro"}})
    with pytest.raises(ConfigError, match=r"algorithm .known"):
        parse_config({}, {"algorithm.name": "zzz"})
    with pytest.raises(ConfigError, match="a table"):
        parse_config({"algorithm": "grpo"})


def test_a_setting_that_the_algorithm_does_not_have_is_refused_with_those_that_it_has():
    said = "'algorithm.advantage_scale'.*'grpo'.*clip_low"
    with pytest.raises(ConfigError, match=said):
        parse_config({"algorithm": {"name": "dr_grpo", "advantage_scale": "none"}})
    with pytest.raises(ConfigError, match=said):
        parse_config({"algorithm": {"advantage_scale": "none"}}, {"algorithm.name": "dr_grpo"})
    with pytest.raises(ConfigError, match=r"'algorithm.clip_hihg'.*'clip_high'"):
        parse_config({}, {"algorithm.clip_hihg": 0.3})


def test_a_class_of_ones_own_has_settings_of_its_own():
    given = {"name": "a.b:C", "clip_low": 0.1, "settings": {"horizon": 3}}
    config = parse_config({"algorithm": given}).algorithm
    assert isinstance(config, OwnAlgorithmConfig)
    assert (config.name, config.clip_low, config.settings) == ("a.b:C", 0.1, {"horizon": 3})


def test_groups_of_one_are_refused_where_episodes_are_compared():
    for name in ("grpo", "dr_grpo"):
        with pytest.raises(ConfigError, match=f"group_size.*1.*algorithm.name.*'{name}'"):
            parse_config({"rollout": {"group_size": 1}, "algorithm": {"name": name}})
    assert parse_config({"rollout": {"group_size": 1}, "algorithm": {"name": "a:B"}}).rollout.least_completed == 1
    assert parse_config({"rollout": {"group_size": 1}, "kind": "inference"}).rollout.group_size == 1


@pytest.mark.parametrize("more", [{}, {"from_run": "runs/x"}])
def test_a_coefficient_does_not_adapt_to_episodes_that_the_policy_has_not_sampled(more):
    """Their divergence at sampling is not the policy's, so no coefficient would ever bring it to the target."""
    given = {"name": "sft", "kl": {"coefficient": 0.1}, **more}
    assert create_algorithm(parse_config({"algorithm": given}).algorithm).recorded is not None
    given["kl"] = {"coefficient": 0.1, "target": 0.05}
    with pytest.raises(ConfigError, match=r"'sft'.*kl\.target"):
        create_algorithm(parse_config({"algorithm": given}).algorithm)
    assert create_algorithm(parse_config({"algorithm": {"name": "grpo", "kl": given["kl"]}}).algorithm)


@pytest.mark.parametrize(
    "name", ["", 3, None, ":", "a:", ":B", "a b:C", "../a:B", "a:B:C", "a/b:C", "grpo\n", "os:system('x')"]
)
def test_what_is_no_name_is_refused_by_the_configuration(name):
    with pytest.raises(ConfigError):
        parse_config({"algorithm": {"name": name}})


def test_code_of_ones_own_is_imported_only_where_it_is_allowed():
    name = "unit.algorithms.own_algorithm:Surprise"
    sys.modules.pop("unit.algorithms.own_algorithm", None)
    with pytest.raises(ConfigError, match=r"palestra\.train"):
        create_algorithm(OwnAlgorithmConfig(name=name))
    assert "unit.algorithms.own_algorithm" not in sys.modules
    made = create_algorithm(OwnAlgorithmConfig(name=name), own_code=True)
    assert isinstance(made, Algorithm)
    assert made.loss().name == "surprise"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:A", "imported.*'no_such_module'"),
        ("unit.algorithms.own_algorithm:Nothing", "'Nothing'"),
        ("unit.algorithms.own_algorithm:SurpriseLoss", "no subclass"),
    ],
)
def test_a_class_that_is_none_is_told(name, said):
    with pytest.raises(ConfigError, match=said):
        create_algorithm(OwnAlgorithmConfig(name=name), own_code=True)
