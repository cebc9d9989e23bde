"""What holds of every algorithm that ships, for any rewards: who is trained, how often, and what does not matter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat, make_trajectory

from palestra.algorithms.loss import LossInputs
from palestra.algorithms.losses import build_loss
from palestra.algorithms.policy_gradient import PolicyGradient
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import parse_config
from palestra_inspect.algorithm_check import TOLERANCE, made_up_groups, token_gradients

rewards_of_groups = st.lists(
    st.lists(st.integers(-4, 4).map(lambda number: number / 4), min_size=2, max_size=4), min_size=1, max_size=3
)


def made(name: str, **settings):
    return create_algorithm(parse_config({"algorithm": {"name": name, **settings}}).algorithm)


def same(found, wanted):
    largest = max((abs(value) for value in wanted.values()), default=0.0)
    assert found.keys() == wanted.keys()
    for token, value in wanted.items():
        assert abs(found[token] - value) <= TOLERANCE * max(largest, 1e-9)


@pytest.mark.parametrize("name", [name for name, made in ALGORITHMS.items() if not made.every_choice])
@examples(5, 50)
@given(rewards_of_groups, st.sampled_from([1, 2, 3, 6]), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_neither_cutting_nor_order_nor_padding_matters_and_each_token_is_trained_once(
    name, rewards, calls, rows, reverse, pad
):
    if name in ("dpo", "reward_model"):
        rewards = [members[:2] for members in rewards]  # its groups are pairs
    wanted = token_gradients(made(name), made_up_groups(rewards=rewards))
    other = made_up_groups(
        rewards=rewards, calls=calls, rows=min(rows, calls), reverse=reverse, pad=pad, prompt=2 + pad
    )
    same(token_gradients(made(name), other), wanted)
    sampled = [int(token) for group in other for row in group.rows for token in row.ids[row.loss_mask]]
    assert len(sampled) == len(set(sampled))
    algorithm = made(name)
    learned = [group for group in other if algorithm.learns_from(group.trajectories)]
    assert wanted.keys() == {int(token) for group in learned for row in group.rows for token in row.ids[row.loss_mask]}


@examples(5, 50)
@given(rewards_of_groups, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_only_the_last_token_of_a_reply_has_a_reward_however_its_calls_are_cut(rewards, calls, rows, reverse, pad):
    pairs = [members[:2] for members in rewards]
    found = []
    for more in ({}, {"rows": min(rows, calls), "reverse": reverse, "pad": pad}):
        groups = made_up_groups(rewards=pairs, calls=calls, **more)
        whole = [row for group in groups for row in group.rows]
        values = [np.where(row.loss_mask, row.ids / 1000, np.nan).astype(np.float32) for row in whole]
        given = made("reward_model").advantages(groups, {"action_values": values})
        targets = {
            int(row.ids[place]): (row.episode_id, float(column[place]))
            for row, column in zip(whole, given.returns, strict=True)
            for place in np.flatnonzero(np.isfinite(column))
        }
        assert sorted(name for name, _ in targets.values()) == sorted({row.episode_id for row in whole})
        found.append(targets)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name, made in ALGORITHMS.items() if issubclass(made, PolicyGradient)])
@examples(5, 50)
@given(rewards_of_groups, st.integers(1, 3))
def test_an_advantage_of_zero_gives_no_gradient(name, rewards, scale):
    """Where all returns of all groups are equal; a moving baseline and a critic may still expect other returns."""
    equal = [[float(scale)] * len(group) for group in rewards]
    found = token_gradients(made(name), made_up_groups(rewards=equal))
    assert name == "rae" or made(name).critic is not None or not any(found.values())


# Two arms, whose probabilities are a softmax: the mean gradient over all samples, weighed by how probable they are

ARMS = torch.tensor([0.3, -0.5], dtype=torch.float64)
REWARD = (1.0, 0.25)


def gradient_of_outcome(algorithm, arms) -> tuple[float, torch.Tensor]:
    """How probable a group of pulls is, and the gradient of its loss by the logits of the arms."""
    logits = ARMS.clone().requires_grad_(True)
    logprobs = torch.log_softmax(logits, 0)[list(arms)]
    episodes = [make_trajectory(0, n, REWARD[arm], [make_chat(completion=[7])]) for n, arm in enumerate(arms)]
    (found,) = algorithm.estimate([algorithm.returns(episodes)])
    inputs = LossInputs(
        logprobs=logprobs,
        sampling_logprobs=logprobs.detach(),
        old_logprobs=None,
        advantages=torch.tensor([by_call[0] for by_call in found.by_call], dtype=torch.float64),
        on_policy=torch.ones(len(arms), dtype=torch.bool),
        sequence_means=torch.zeros(len(arms), dtype=torch.float64),
    )
    build_loss(algorithm.loss())(inputs).loss.mean().backward()
    return float(logprobs.detach().sum().exp()), logits.grad


def expected_gradient(algorithm, group: int) -> torch.Tensor:
    outcomes = [gradient_of_outcome(algorithm, arms) for arms in itertools.product(range(2), repeat=group)]
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1.0)
    return sum(probability * gradient for probability, gradient in outcomes)


def exact_gradient() -> torch.Tensor:
    """Minus the gradient of the expected reward: -p q (R_0 - R_1) for the first arm, and its opposite."""
    p, q = torch.softmax(ARMS, 0)
    slope = p * q * (REWARD[0] - REWARD[1])
    return torch.stack([-slope, slope])


@pytest.mark.parametrize("group", [2, 3, 4])
def test_leaving_one_out_is_unbiased(group):
    torch.testing.assert_close(expected_gradient(made("rloo"), group), exact_gradient())


@pytest.mark.parametrize(
    ("name", "settings"),
    [("dr_grpo", {}), ("gspo", {"advantage_scale": "none"}), ("cispo", {"advantage_scale": "none"})],
)
@pytest.mark.parametrize("group", [2, 3, 4])
def test_the_groups_own_mean_makes_the_gradient_smaller_by_one_in_the_groups_size(name, settings, group):
    torch.testing.assert_close(expected_gradient(made(name, **settings), group), exact_gradient() * (1 - 1 / group))


def test_a_moving_baseline_that_is_far_behind_is_unbiased_but_for_its_share_of_the_return():
    """With a group of one, b <- d b + (1 - d) R leaves A = d (R - b), so the gradient is d times the exact one."""
    wanted = exact_gradient() * 0.95
    outcomes = []
    for arm in range(2):
        algorithm = made("rae")
        algorithm.restore({"baselines": {"agent": 0.4}})
        outcomes.append(gradient_of_outcome(algorithm, [arm]))
    torch.testing.assert_close(sum(p * gradient for p, gradient in outcomes), wanted)


@pytest.mark.parametrize("group", [2, 3])
def test_dividing_by_the_deviation_has_the_direction_of_the_exact_gradient(group):
    """Two arms have one direction; GRPO takes a larger step where the arms' rewards differ less."""
    for name in ("grpo", "dapo"):
        found = expected_gradient(made(name), group)
        assert float(found[0]) < 0 < float(found[1])
        assert float(found.sum()) == pytest.approx(0.0, abs=1e-12)
        distinct = [arms for arms in itertools.product(range(2), repeat=group) if len(set(arms)) > 1]
        p = torch.softmax(ARMS, 0)
        wanted = 0.0
        for arms in distinct:
            values = np.array([REWARD[arm] for arm in arms])
            scaled = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
            chance = float(np.prod([float(p[arm]) for arm in arms]))
            wanted -= chance * float(
                np.mean([a * ((arm == 0) - float(p[0])) for a, arm in zip(scaled, arms, strict=True)])
            )
        assert float(found[0]) == pytest.approx(wanted, abs=1e-9)
