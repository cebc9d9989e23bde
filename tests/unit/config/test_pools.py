"""Roles that past versions play: what may be written, and what is refused."""

from __future__ import annotations

import tomllib

import pytest

from palestra.config import JobConfig, PoolConfig, RoleConfig, dump_config, parse_config, past_name, past_of
from palestra.config.roles import Roles
from palestra.errors import ConfigError

PAST = {"policy": "white", "pool": {}}


def job(role: object, **changes: object) -> JobConfig:
    return parse_config({"policies": {"white": {}}, "roles": {"opponent": role}} | changes)


def test_a_pool_has_defaults_and_is_written_back_as_it_was():
    config = job(PAST)
    assert config.players == Roles(
        default="white",
        named={"opponent": "white"},
        pools={"opponent": PoolConfig()},
        untrained=config.rollout.untrained_agents,
    )
    assert parse_config(tomllib.loads(dump_config(config))) == config
    assert JobConfig(policies={"white": {}}, roles={"opponent": RoleConfig(**PAST)}) == config


def test_a_role_of_the_newest_weights_is_the_name_of_its_policy():
    """So that a run's digest does not depend on how the role is written."""
    assert job({"policy": "white"}).roles == {"opponent": "white"}
    assert job({"policy": "white"}).digest() == job("white").digest()
    assert job(PAST).digest() != job("white").digest()


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (
            PAST | {"pool": {"siz": 2}},
            r"'roles.opponent.pool.siz'; did you mean 'size'",
        ),
        ({"pool": {}}, "roles.opponent.policy: this key has to be given: "),
        (
            PAST | {"policy": "black"},
            "roles.opponent.policy is 'black', and there is no such policy (there are 'white')",
        ),
        (PAST | {"pool": {"size": 65}}, "roles.opponent.pool.size: Input should be less than or equal to 64"),
        ("white@5", "roles.opponent: a name has 1 to 64 letters"),
        ("mee", "roles.opponent is 'mee', and there is no such policy"),
        (PAST | {"policy": "white@5"}, "roles.opponent.policy: a name has 1 to 64 letters"),
        (PAST | {"pool": {"every_steps": 30}}, "the job has 30 steps: its pool would never have another version than"),
        (PAST | {"pool": {"latest_share": 0.5}}, "so that 'white' also plays against its newest self"),
        (PAST | {"versions": "pool"}, "unknown key 'roles.opponent.versions'"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(role, said):
    with pytest.raises(ConfigError) as caught:
        job(role)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_episodes_that_are_played_ahead_see_later_versions_later():
    late = PAST | {"pool": {"every_steps": 5}}
    job(late, steps=7, rollout={"max_staleness": 1})
    with pytest.raises(ConfigError, match="6 steps"):
        job(late, steps=6, rollout={"max_staleness": 1})


def test_a_pool_of_a_frozen_policy_is_refused_and_one_beside_it_is_not():
    policies = {"white": {}, "black": {"frozen": True}}
    with pytest.raises(ConfigError, match=r"'black'.*roles.opponent.*'black'"):
        job(PAST | {"policy": "black"}, policies=policies)
    job(PAST, policies=policies)


def test_the_newest_weights_may_play_where_each_agent_has_its_own_reward():
    own = {"name": "rae"}
    assert job(PAST | {"pool": {"latest_share": 0.5}}, algorithm=own).players.pools["opponent"].latest_share == 0.5


def test_a_trained_policy_that_only_its_past_plays_is_refused():
    two = {"white": {}, "black": {}}
    own = {"name": "rae"}
    past = {"policy": "black", "pool": {}}
    with pytest.raises(ConfigError, match=r"policies.black.*past"):
        job(past, policies=two, algorithm=own)
    job(past | {"pool": {"latest_share": 0.5}}, policies=two, algorithm=own)
    parse_config({"policies": two, "roles": {"opponent": past, "black": "black"}})
    with pytest.raises(ConfigError, match=r"policies.black.*plays"):
        parse_config({"policies": two})


def test_a_job_that_serves_has_no_use_for_a_pool_and_refuses_none():
    job(PAST, kind="inference", policies={"white": {"frozen": True}})


def test_the_roles_of_an_episode_are_those_of_its_players():
    roles = Roles(default="white", named={"opponent": "white", "judge": "old"}, frozen=frozenset({"old"}))
    now = roles.of_episode({"opponent": "white@5"})
    assert [now.policy_of(agent) for agent in ("agent", "opponent", "opponent/x-1", "judge")] == [
        "white", "white@5", "white@5", "old"
    ]  # fmt: skip
    assert now.trained_rewards({"agent": 1.0, "opponent": -1.0, "judge": 3.0}) == {"agent": 1.0}
    assert (now.plays_frozen("opponent"), now.plays_frozen("agent")) == (True, False)
    newest = roles.of_episode({"opponent": "white"})
    assert newest.trained_rewards({"agent": 1.0, "opponent": -1.0}) == {"agent": 1.0, "opponent": -1.0}
    assert roles.of_episode({}) is roles


def test_names_of_past_versions():
    assert past_name("white", 5) == "white@5"
    assert past_of("white@5") == ("white", 5)
    assert [past_of(name) for name in ("white", "white@", "@5", "white@x", "a@1@2")] == [None] * 5
