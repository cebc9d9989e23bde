"""PPO and A2C: advantages and returns of groups, penalties as rewards, and the settings that each has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from palestra.algorithms.base import Group
from palestra.algorithms.gae import chains_of, generalized_advantages
from palestra.algorithms.loss import LossSpec
from palestra.algorithms.registry import create_algorithm
from palestra.algorithms.regularization import Regularization
from palestra.config import A2CConfig, GRPOConfig, JobConfig, KLConfig, PPOConfig
from palestra.errors import ConfigError
from unit.algorithms.test_gae import columns, played, trained
from unit.building import make_sample


def two_groups(**episode):
    """Two groups of two episodes, of one to three TimeSteps."""
    groups, number = [], 0
    for group in range(2):
        members, rows = [], []
        for sample in range(2):
            number += 1
            name = f"train-{group:06d}-{sample:02d}"
            rewards = tuple(0.5 * n - number for n in range(number % 3 + 1))
            one, own = played([("agent", 2)] * len(rewards), step_rewards=rewards, **episode)
            members.append(replace(one, episode=replace(one.episode, episode_id=name, sample_index=sample)))
            rows += [replace(row, episode_id=name) for row in own]
        groups.append(Group(trajectories=tuple(members), rows=tuple(rows)))
    return groups


def forward_of(groups, seed: int = 0):
    rows = [row for group in groups for row in group.rows]
    draw = np.random.default_rng(seed)
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    return rows, {name: columns(rows, draw.normal(size=tokens)) for name in ("values", "next_values")}


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("cut_off", [False, True])
def test_each_episode_has_its_own_advantages_wherever_it_stands(level, cut_off):
    groups = two_groups(facts={"termination": "max_steps"} if cut_off else {})
    rows, forward = forward_of(groups)
    ppo = create_algorithm(PPOConfig(gae_level=level, advantage_scale="none", discount=0.9, gae_lambda=0.7))
    assert ppo.needs == {"values", "next_values"}
    found = ppo.advantages(groups, forward)
    start = 0
    for group in groups:
        for trajectory in group.trajectories:
            own = [row for row in group.rows if row.episode_id == trajectory.episode.episode_id]
            part = slice(start, start := start + len(own))
            alone = generalized_advantages(
                chains_of(trajectory, dict(enumerate(own)), "step", 0.9),
                own,
                forward["values"][part],
                forward["next_values"][part],
                discount=0.9,
                decay=0.7,
                level=level,
            )
            for mine, theirs in ((found.advantages, alone.advantages), (found.returns, alone.returns)):
                assert all(np.array_equal(a, b) for a, b in zip(mine[part], theirs, strict=True))
    assert start == len(rows)


def test_the_order_of_groups_and_of_rows_does_not_matter():
    groups = two_groups()
    rows, forward = forward_of(groups)
    turned = [replace(group, rows=group.rows[::-1]) for group in groups[::-1]]
    back = {name: found[::-1] for name, found in forward.items()}
    for config in (PPOConfig(), A2CConfig(gae_level="turn")):
        one = create_algorithm(config).advantages(groups, forward)
        two = create_algorithm(config).advantages(turned, back)
        np.testing.assert_allclose(trained(rows, one.advantages), trained(rows, two.advantages[::-1]), atol=1e-6)
        np.testing.assert_allclose(trained(rows, one.returns), trained(rows, two.returns[::-1]), atol=1e-6)


def test_scaled_advantages_have_mean_0_and_deviation_1_over_the_trained_tokens():
    groups = two_groups()
    rows, forward = forward_of(groups)
    plain = create_algorithm(PPOConfig(advantage_scale="none")).advantages(groups, forward)
    scaled = create_algorithm(PPOConfig()).advantages(groups, forward)
    raw, found = trained(rows, plain.advantages), trained(rows, scaled.advantages)
    np.testing.assert_allclose(found, (raw - raw.mean()) / (raw.std() + 1e-8), rtol=1e-5)
    assert found.mean() == pytest.approx(0.0, abs=1e-6)
    assert found.std() == pytest.approx(1.0, abs=1e-6)
    assert scaled.metrics["advantage_std"] == pytest.approx(raw.std(), rel=1e-6)
    values, returns = trained(rows, forward["values"]), trained(rows, plain.returns)
    assert scaled.metrics["explained_variance"] == pytest.approx(
        1 - np.var(returns - values) / np.var(returns), rel=1e-5
    )
    assert scaled.metrics["return_mean"] == pytest.approx(returns.mean(), rel=1e-5)


def test_a_batch_without_rows_has_no_advantages():
    found = create_algorithm(PPOConfig()).advantages([Group(trajectories=())], {})
    assert (found.advantages, found.returns, found.metrics) == ([], [], {})


def test_a_perfect_critic_leaves_no_advantage_and_equal_rewards_are_learned_from_all_the_same():
    groups = two_groups()
    ppo = create_algorithm(PPOConfig(advantage_scale="none", gae_lambda=0.3))
    assert ppo.learns_from(groups[0].trajectories[:1] * 2)
    rows, forward = forward_of(groups)
    perfect = create_algorithm(PPOConfig(advantage_scale="none", gae_lambda=1.0)).advantages(groups, forward).returns
    found = ppo.advantages(groups, {"values": perfect, "next_values": perfect})
    np.testing.assert_allclose(trained(rows, found.advantages), 0.0, atol=1e-6)
    np.testing.assert_allclose(trained(rows, found.returns), trained(rows, perfect), atol=1e-6)


# Penalty and bonus


def kl(**settings) -> PPOConfig:
    return PPOConfig(kl=KLConfig(**settings), entropy_coefficient=0.01, advantage_scale="none", gae_lambda=1.0)


def test_a_penalty_in_the_reward_lowers_the_return_of_its_own_token_and_of_those_before():
    trajectory, (row,) = played([("agent", 3)], reward=1.0)
    reference = [
        np.where(row.loss_mask, row.logprobs - np.float32([0, 0, 0, 0.5, 1.0, 2.0]), np.nan).astype(np.float32)
    ]
    made = Regularization(kl(coefficient=0.1, estimator="k1", place="reward"))
    rewards = made.token_rewards([row], {"reference_logprobs": reference})
    np.testing.assert_allclose(rewards[0], [0, 0, 0, -0.05, -0.1, -0.2], rtol=1e-6)
    group = Group(trajectories=(trajectory,), rows=(replace(row, token_rewards=rewards[0]),))
    zeros = columns([row], [0.0] * 3)
    found = create_algorithm(kl(coefficient=0.1)).advantages([group], {"values": zeros, "next_values": zeros})
    np.testing.assert_allclose(trained([row], found.advantages), [0.65, 0.7, 0.8], rtol=1e-6)
    spec = made.add_to(LossSpec(name="any"))
    assert (spec.kl_coefficient, spec.entropy_coefficient) == (0.0, 0.01)  # it is not punished twice


def test_a_penalty_in_the_loss_is_none_in_the_reward():
    made = Regularization(kl(coefficient=0.1, estimator="k2"))
    row = make_sample([1, 2, 3], [2])
    assert made.outputs == {"reference_logprobs"}
    assert made.token_rewards([row], {"reference_logprobs": [row.logprobs]}) is None
    spec = made.add_to(LossSpec(name="any", parameters={"a": 1}))
    assert spec == LossSpec(
        name="any", parameters={"a": 1}, kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01
    )


def test_the_coefficient_follows_the_divergence_at_sampling_and_is_remembered():
    row = make_sample([1, 2, 3, 4], [2, 3], logprobs=[-1.0, -1.0])
    far = {"reference_logprobs": [np.array([np.nan, np.nan, -3.0, -1.0], np.float32)]}
    made = Regularization(kl(coefficient=0.1, estimator="k1", target=0.5))
    assert made.adapt([row], far) == {"kl_coefficient": 0.1, "kl_at_sampling": 1.0}
    assert made.add_to(LossSpec(name="any")).kl_coefficient == pytest.approx(0.1 * 1.02)
    again = Regularization(kl(coefficient=0.1, estimator="k1", target=0.5))
    again.restore(made.state())
    assert again.state() == made.state()
    assert again.adapt([row], far)["kl_coefficient"] == pytest.approx(0.1 * 1.02)
    again.restore({})  # a checkpoint of a run without a reference
    assert again.adapt([], far) == {}


def test_without_a_reference_there_is_nothing_to_do():
    made = Regularization(GRPOConfig())
    spec = LossSpec(name="any")
    assert (made.outputs, made.state(), made.add_to(spec), made.adapt([], {})) == (frozenset(), {}, spec, {})


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "a2c", "epochs": 2}, "epochs"),
        ({"name": "a2c", "clip_low": 0.1}, "clip_low"),
        ({"name": "ppo", "advantage": 0.1}, "advantage"),
        ({"name": "grpo", "gae_lambda": 0.1}, "gae_lambda"),
        ({"name": "grpo", "kl": {"coefficient": 0.1, "place": "reward"}}, "'grpo'.*single"),
        ({"name": "ppo", "kl": {"target": 0.1}}, "stays 0"),
        ({"name": "ppo", "critic": {"warmup": 1}}, "'warmup_steps'"),
    ],
)
def test_settings_that_an_algorithm_does_not_have_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        JobConfig(algorithm=settings)


def test_what_is_not_used_changes_no_digest():
    """So that runs of earlier versions can be resumed."""
    plain = JobConfig()
    assert plain.digest() == JobConfig(algorithm={"entropy_coefficient": 0.0, "kl": None}).digest()
    for other in ({"entropy_coefficient": 0.1}, {"kl": {}}, {"name": "ppo"}):
        assert JobConfig(algorithm=other).digest() != plain.digest()


def test_ppo_and_a2c_make_groups_of_one():
    for name in ("ppo", "a2c"):
        assert JobConfig(algorithm={"name": name}, rollout={"group_size": 1}).rollout.least_completed == 1
