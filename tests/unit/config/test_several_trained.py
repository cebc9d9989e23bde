"""Several policies that are trained: whose algorithm, in which steps, and what is refused before the job starts."""

from __future__ import annotations

import tomllib

import pytest

from palestra.config import dump_config, parse_config
from palestra.errors import ConfigError

TWO = {"policies": {"white": {}, "black": {}}, "roles": {"opponent": "black"}}


def of_black(**keys) -> dict:
    return TWO | {"policies": {"white": {}, "black": keys}}


def test_each_has_an_algorithm_of_its_own_or_the_jobs():
    given = of_black(algorithm={"name": "ppo", "clip_low": 0.1}, updates={"every_steps": 3})
    config = parse_config(given | {"algorithm": {"name": "rloo"}})
    assert (config.algorithm_of("white").name, config.algorithm_key("white")) == ("rloo", "algorithm")
    assert (config.algorithm_of("black").name, config.algorithm_of("black").clip_low) == ("ppo", 0.1)
    assert config.algorithm_key("black") == "policies.black.algorithm"
    assert config.trains_several
    assert config.trained_policies == config.players.rivals == ("white", "black")
    assert config.players.default == "white"
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_one_that_is_trained_has_no_rivals():
    beside = TWO | {"policies": {"white": {}, "black": {"frozen": True}}}
    assert not parse_config(beside).trains_several
    assert parse_config(beside).players.rivals == ()
    written = parse_config(TWO | {"policies": {"white": {"updates": {"every_steps": 1}}, "black": {"frozen": True}}})
    assert written.digest() == parse_config(beside).digest()


@pytest.mark.parametrize(
    "changed",
    [
        of_black(updates={"every_steps": 2}),
        of_black(algorithm={"name": "rloo"}),
        of_black(algorithm={"clip_low": 0.1}),
        of_black(frozen=True),
    ],
)
def test_the_digest_changes_with_what_is_trained_of_any_policy(changed):
    digests = {parse_config(each).digest() for each in (TWO, of_black(updates={"every_steps": 2}), changed)}
    assert len(digests) == (2 if changed == of_black(updates={"every_steps": 2}) else 3)
    same = of_black(algorithm={"name": "distill", "teacher_server": {"url": "http://a", "timeout_seconds": 1}})
    moved = of_black(algorithm={"name": "distill", "teacher_server": {"url": "http://b"}})
    assert parse_config(same).digest() == parse_config(moved).digest()


@pytest.mark.parametrize(
    ("white", "black", "due"),
    [(1, 1, [1, 2, 3, 4, 5, 6]), (1, 2, [1, 3, 5]), (2, 2, [2, 4, 6]), (2, 3, [1, 4]), (3, 3, [2, 5]), (5, 5, [2])],
)
def test_policies_that_are_updated_equally_often_take_turns(white, black, due):
    policies = {"white": {"updates": {"every_steps": white}}, "black": {"updates": {"every_steps": black}}}
    config = parse_config(TWO | {"policies": policies})
    assert [step for step in range(1, 7) if config.updates_in("black", step)] == due
    assert [config.updates_until("black", step) for step in range(7)] == [
        sum(one <= step for one in due) for step in range(7)
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (of_black(updates={"at": 2}), "unknown key 'policies.black.updates.at'"),
        (
            {
                "steps": 1,
                "policies": {n: {"updates": {"every_steps": 2}} for n in ("white", "black")},
                "roles": {"b": "black"},
            },
            "policies.black.updates.every_steps is 2, and the job has 1 steps",
        ),
        (of_black(algorithm={"name": "sft"}), "policies.black.algorithm.name is 'sft', which trains recorded episodes"),
        (TWO | {"algorithm": {"name": "sft", "from_run": "x"}}, "algorithm.name is 'sft', which trains recorded"),
        (of_black(algorithm={"advantage_scale": "gdpo"}), "policies.black.algorithm.advantage_scale is 'gdpo'"),
        (TWO | {"roles": {}}, "policies.black is trained and plays no agent, so that it would have no rewards: give"),
        (
            {"policies": {"white": {}, "step-1": {}}, "roles": {"b": "step-1"}},
            "policies.step-1 has the name of a check",
        ),
        ({"policies": {"a": {}, "A": {}}, "roles": {"b": "A"}}, "policies.a and policies.A differ in case only"),
        (
            of_black(algorithm={"minibatches": 9}),
            "policies.black.algorithm.minibatches is 9, and rollout.groups_per_step is 8",
        ),
        (
            TWO | {"rollout": {"group_size": 1}, "algorithm": {"name": "ppo"}} | of_black(algorithm={"name": "grpo"}),
            "rollout.group_size is 1, and policies.black.algorithm.name = 'grpo' compares the episodes",
        ),
        (of_black(algorithm={"name": "distill", "teacher": "white"}), "algorithm.teacher"),
        (
            of_black(algorithm={"name": "ppx"}),
            "policies.black.algorithm: name is 'ppx', which is no algorithm; did you",
        ),
        (of_black(algorithm={"clip_lo": 1}), "unknown key 'policies.black.algorithm.clip_lo'; did you mean 'clip_low'"),
        (
            of_black(algorithm={"name": "sac", "clip_low": 1}),
            "'policies.black.algorithm.clip_low' is a key of name = 'grpo'",
        ),
        (
            of_black(frozen=True, updates={"every_steps": 2}),
            "leave out either `frozen` or its `updates`",
        ),
        (of_black(frozen=True, algorithm={"name": "grpo"}), "leave out either `frozen` or its `algorithm`"),
    ],
)
def test_what_can_not_be_is_refused_with_the_key(changes, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rewards_are_those_of_the_agents_that_a_policy_plays():
    roles = parse_config(
        {
            "policies": {"planner": {}, "solver": {}, "judge": {"frozen": True}},
            "roles": {"boss/solver": "solver", "judge": "judge", "judge/helper": "solver"},
        }
    ).players
    given = {"boss": 1.0, "boss/solver-1": 0.5, "boss/solver-2": 0.25, "judge": 4.0}
    assert roles.rewards_of("planner", given) == {"boss": 1.0}
    # The judge is the parent of an agent that it plays, which has no reward of its own.
    assert roles.rewards_of("solver", given) == {"boss/solver-1": 0.5, "boss/solver-2": 0.25, "judge": 4.0}
    assert roles.rewards_of("solver", {"boss": 1.0}) == {"boss": 1.0}
    assert roles.rewards_of("planner", {"judge": 1.0}) == {}
