from __future__ import annotations

import re

import pytest

from palestra.config import find_mistakes, parse_config
from palestra.config.loading import _is_known
from palestra.config.section import TRL, VERL, dotted_key, key_parts
from palestra.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def written(text: str):
        (tmp_path / "job.toml").write_text(text)
        return tmp_path / "job.toml"

    return written


def test_a_configuration_without_mistakes_is_returned_as_it_is(write):
    config, mistakes = find_mistakes(write("steps = 3\n"), {"seed": 4})
    assert mistakes == []
    assert config is not None
    assert (config.steps, config.seed) == (3, 4)


def test_every_mistake_is_listed_once_and_the_rest_of_the_configuration_is_returned(write):
    text = 'setps = 3\nseed = -1\nname = "mine"\n[rollout]\ngruop_size = 2\nlease_seconds = 0\n[engine]\ndtpye = "x"\n'
    config, mistakes = find_mistakes(write(text), {"rollout.max_staleness": 99})
    assert sorted(".".join(mistake.place) for mistake in mistakes) == [
        "engine.dtpye",
        "rollout.gruop_size",
        "rollout.lease_seconds",
        "rollout.max_staleness",
        "seed",
        "setps",
    ]
    assert len({mistake.text for mistake in mistakes}) == 6
    assert config is not None
    assert (config.name, config.seed, config.rollout.lease_seconds) == ("mine", 0, 120.0)


def test_keys_that_do_not_fit_together_are_found_after_those_that_are_wrong_in_themselves(write):
    config, mistakes = find_mistakes(write('seed = -1\n[roles]\njudge = "nobody"\n'))
    assert config is None
    assert [mistake.place for mistake in mistakes] == [("seed",), ()]
    assert "there is no such policy" in mistakes[1].text
    config, mistakes = find_mistakes(write("seed = -1\n[environment]\nrunners = 1\n"))
    assert config is not None
    assert [mistake.place for mistake in mistakes] == [("seed",), ("environment",)]


def test_a_file_that_can_not_be_read_is_refused(write, tmp_path):
    with pytest.raises(ConfigError, match="not valid TOML"):
        find_mistakes(write("steps ="))
    with pytest.raises(ConfigError, match="no such file"):
        find_mistakes(tmp_path / "none.toml")


@pytest.mark.parametrize("keys", [TRL, VERL])
def test_every_name_of_another_library_stands_for_a_key_that_there_is(keys):
    for name, key in keys.items():
        steps = tuple(key.split("."))
        assert _is_known(steps), (name, key)
        with pytest.raises(ConfigError, match=rf"unknown key '{name}'; (TRL|verl)'s {name} is '{key}' here"):
            parse_config({name: 1})


def test_names_of_the_library_of_a_part_win_over_those_of_others():
    with pytest.raises(ConfigError, match=r"algorithm\.epsilon'; TRL's epsilon is 'algorithm.clip_low' here"):
        parse_config({"algorithm": {"epsilon": 0.2}})
    with pytest.raises(ConfigError, match=r"unknown key 'policies.a.epsilon'; (?!TRL)"):
        parse_config({"policies": {"a": {"epsilon": 0.2}}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"roles": {"": "policy"}}, "config: roles: an agent's name has 1 to 200 printable characters: ''"),
        (
            {"policies": {"no name": {}}},
            "config: policies: a name has 1 to 64 letters (a to z), digits, '.', '_' and '-', and begins with",
        ),
        ({"policies": {"v1.5": {"modle": "x"}}}, "unknown key 'policies.\"v1.5\".modle'; did you mean 'model'?"),
    ],
)
def test_a_wrong_name_of_a_policy_or_a_role_is_shown_where_it_stands(data, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config(data)


def test_a_name_with_a_dot_can_be_set_in_quotes():
    settings = {'policies."v1.5".frozen': True, "policies.new.max_context": 128, 'roles."agent/solver.1"': "v1.5"}
    config = parse_config({}, settings)
    assert config.policies["v1.5"].frozen
    assert config.roles == {"agent/solver.1": "v1.5"}
    assert config.trained_policies == ("new",)
    assert key_parts(dotted_key(("a", "b.c", "d"))) == ("a", "b.c", "d")
    assert key_parts('"a.b".c."d') == ("a.b", "c", '"d')
