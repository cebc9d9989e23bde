"""Several policies and roles in a configuration."""

from __future__ import annotations

import tomllib

import pytest

from palestra.config import AdapterConfig, JobConfig, OptimizerConfig, PolicyConfig, dump_config, parse_config
from palestra.config.roles import Roles
from palestra.errors import ConfigError

TWO = {"policies": {"white": {"model": "tiny-random"}, "black": {"frozen": True}}, "roles": {"opponent": "black"}}
ROLES = Roles(
    default="white",
    named={"opponent": "black", "planner": "black", "planner/search": "white", "agent/solver": "black"},
    frozen=frozenset({"black"}),
)


def test_one_policy_is_trained_and_the_others_are_frozen():
    config = parse_config(TWO)
    assert config.trained_policies == ("white",)
    untrained = config.rollout.untrained_agents
    assert config.players == Roles(
        default="white", named={"opponent": "black"}, frozen=frozenset({"black"}), untrained=untrained
    )


def test_the_policy_that_is_trained_plays_what_is_not_named_wherever_it_stands():
    config = parse_config({"policies": {"old": {"frozen": True}, "new": {}}})
    assert config.players.default == "new"


def test_a_job_that_serves_may_have_any_policies():
    config = parse_config({"kind": "inference", "policies": {"a": {"frozen": True}, "b": {"frozen": True}}})
    assert (config.trained_policies, config.players.default) == ((), "a")
    both = parse_config({"kind": "inference", "policies": {"a": {}, "b": {}}})
    assert (both.trained_policies, both.players.default) == (("a", "b"), "a")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": {}}, "at least 1"),
        ({"policies": {f"p{n}": {"frozen": n > 0} for n in range(9)}}, "at most 8"),
        ({"policies": {"a": {"frozen": True}}}, "all policies are frozen, and a training job trains at least one"),
        (
            {"policies": {"a": {}, "b": {"frozen": True, "optimizer": {"learning_rate": 1e-5}}}},
            "policies.b: a frozen policy is never trained; leave out either `frozen` or its `optimizer`",
        ),
        ({"roles": {"black": "other"}}, "roles.black is 'other', and there is no such policy (there are 'policy')"),
        ({"roles": {"a//b": "policy"}}, "an agent's name has 1 to 200 printable characters: 'a//b'"),
        ({"policies": {"a": {}, "b": {}}, "model": "tiny-random"}, "`model` is of the one policy that is not frozen"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_model_is_that_of_the_policy_which_is_trained():
    config = parse_config(TWO | {"model": "org/model"})
    assert [policy.model for policy in config.policies.values()] == ["org/model", "SmolLM2-135M-Instruct"]
    assert list(config.policies) == ["white", "black"]
    assert config.with_model("other").policies["white"] == PolicyConfig(model="other")
    assert config.with_model("other").policies["black"] == config.policies["black"]
    with pytest.raises(ConfigError, match=r"`model`.*policy"):
        parse_config({"kind": "inference", "policies": {"a": {}, "b": {}}}).with_model("other")
    with pytest.raises(ConfigError, match="1 character"):
        config.with_model("")


def test_what_is_written_can_be_read_again():
    config = parse_config(TWO | {"roles": {"agent/solver": "black"}})
    assert "optimizer" not in tomllib.loads(dump_config(config))["policies"]["black"]
    assert parse_config(tomllib.loads(dump_config(config))) == config
    assert JobConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("policy", "rates"),
    [
        ({}, (2e-5, 0, "constant")),
        ({"adapter": None, "optimizer": {"schedule": "linear"}}, (2e-5, 0, "linear")),
        ({"adapter": {}}, (2e-4, 10, "inverse_sqrt")),
        ({"adapter": {"rank": 64}, "optimizer": {"schedule": "linear"}}, (2e-4, 10, "linear")),
        ({"adapter": AdapterConfig(), "optimizer": OptimizerConfig(schedule="linear")}, (2e-4, 10, "linear")),
        ({"adapter": {}, "optimizer": {"learning_rate": 2e-5}}, (2e-5, 10, "inverse_sqrt")),
        ({"adapter": {}, "optimizer": {"warmup_steps": 0, "schedule": "constant"}}, (2e-4, 0, "constant")),
    ],
)
def test_an_adapter_has_its_own_default_rates(policy, rates):
    config = parse_config({"policies": {"policy": policy}})
    again = parse_config(tomllib.loads(dump_config(config)))
    for optimizer in (each.policies["policy"].optimizer for each in (config, config.with_model("other"), again)):
        assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule) == rates


def test_an_adapter_is_in_the_digest_and_none_is_as_before_there_were_any():
    def digest(**policy):
        return parse_config({"policies": {"policy": policy}}).digest()

    assert digest() == digest(adapter=None)
    assert len({digest(), digest(adapter={}), digest(adapter={"rank": 8}), digest(adapter={"alpha": 8.0})}) == 4
    written = dump_config(parse_config({"policies": {"policy": {"adapter": {"targets": ["q_proj"]}}}}))
    assert parse_config(tomllib.loads(written)).policies["policy"].adapter.targets == ["q_proj"]
    assert "adapter" not in dump_config(parse_config({}))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"adapter": {"rank": 0}}, "policies.policy.adapter.rank"),
        ({"adapter": {"alpha": 0}}, "policies.policy.adapter.alpha"),
        ({"adapter": {"targets": []}}, "targets is empty, so there is nothing to train"),
        ({"adapter": {"ranks": 8}}, "rank"),
        ({"frozen": True, "adapter": {}}, "a frozen policy is never trained, so it gets no new adapter"),
    ],
)
def test_an_adapter_that_can_train_nothing_is_refused(policy, said):
    with pytest.raises(ConfigError) as caught:
        parse_config({"kind": "inference", "policies": {"policy": policy}})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_decides_what_is_trained_is_in_the_digest():
    digests = {
        parse_config(settings).digest()
        for settings in (
            {},
            TWO,
            TWO | {"roles": {}},
            TWO | {"roles": {"opponent": "white"}},
            {"policies": TWO["policies"] | {"black": {"frozen": True, "model": "tiny-random"}}},
        )
    }
    assert len(digests) == 5
    assert parse_config(TWO).digest() == parse_config(TWO | {"steps": 7}).digest()
    linear = {"policies": TWO["policies"] | {"white": {"optimizer": {"schedule": "linear"}}}}
    assert parse_config(linear).digest() != parse_config(linear | {"steps": 7}).digest()


@pytest.mark.parametrize(
    ("agent", "policy"),
    [
        ("agent", "white"),
        ("opponent", "black"),
        ("opponent/helper", "black"),
        ("opponent-2", "black"),
        ("planner", "black"),
        ("planner/draft-1", "black"),
        ("planner/search", "white"),
        ("planner/search-3/deeper-1", "white"),
        ("agent/solver-12", "black"),
        ("agent/solver-12b", "white"),
        ("agent-1/solver-2", "black"),
        ("other/opponent", "white"),
    ],
)
def test_an_agent_is_played_by_its_own_role_or_by_its_parents(agent, policy):
    assert ROLES.policy_of(agent) == policy
    assert ROLES.plays_frozen(agent) == (policy == "black")


def test_numbers_are_left_out_from_the_end_first():
    roles = Roles(
        default="w", named={"agent/solver-2/critic": "a", "agent-1/solver": "b", "agent/solver": "c", "gegnér": "d"}
    )
    agents = ("agent/solver-2/critic-1", "agent-1/solver-2", "agent/solver-3", "agent-4/solver-1", "gegnér-2")
    assert [roles.policy_of(agent) for agent in agents] == ["a", "b", "c", "c", "d"]


def test_the_reward_of_a_frozen_agent_is_that_of_its_trained_subagents():
    roles = Roles(default="w", named={"boss": "old", "boss/solver": "w"}, frozen=frozenset({"old"}))
    assert roles.trained_rewards({"boss": 1.0, "boss/solver-1": 0.5}) == {"boss": 1.0, "boss/solver-1": 0.5}
    assert roles.plays_frozen("boss")
    assert not roles.plays_frozen("boss/solver-1")


def test_where_nothing_is_trained_every_reward_counts():
    roles = parse_config({"kind": "inference", "policies": {"a": {"frozen": True}}}).players
    assert roles.trained_rewards({"agent": 1.0}) == {"agent": 1.0}


def test_frozen_is_true_or_false_and_no_text():
    with pytest.raises(ConfigError, match=r"policies\.b\.frozen"):
        parse_config({"policies": {"a": {}, "b": {"frozen": "false"}}})


def test_rewards_of_agents_that_a_frozen_policy_plays_are_left_out():
    rewards = {"agent": 1.0, "opponent": -1.0, "planner/search": 0.5}
    assert ROLES.trained_rewards(rewards) == {"agent": 1.0, "planner/search": 0.5}
    assert Roles(default="white").trained_rewards(rewards) is rewards


def test_whether_a_tower_is_trained_is_kept_and_a_policy_without_the_key_has_the_digest_that_it_had():
    config = parse_config({"policies": {"policy": {"model": "tiny-random-vision", "vision": "trained"}}})
    assert parse_config(tomllib.loads(dump_config(config))).policies["policy"].vision == "trained"
    assert "vision" not in PolicyConfig().model_dump()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"adapter": {"rank": 4}}, "see.*supported"),
        ({"frozen": True}, "`frozen`.*`vision`"),
        ({"frozen": True, "base": "unix:socket"}, "`frozen`.*`vision`"),
        ({"adapter": {"rank": 4}, "base": "unix:socket"}, "base servers"),
        ({"vision": "half"}, "frozen"),
    ],
)
def test_a_tower_is_trained_with_all_weights_of_a_model_in_this_process(more, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({"policies": {"policy": {"vision": "trained"} | more}})
