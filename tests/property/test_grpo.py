"""Invariants of advantages and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palestra.algorithms.baselines import centred_returns
from palestra.tokens import token_weights

rewards = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)
lengths = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def advantages_of(rewards, scale):
    """Of a group whose episodes have one value each."""
    return [found[0] for found in centred_returns([[reward] for reward in rewards], scale)]


@given(rewards)
def test_advantages_agree_with_numpy(group):
    assume(len(set(group)) > 1)
    array = np.array(group)
    assert np.allclose(advantages_of(group, "none"), array - array.mean(), rtol=1e-9, atol=1e-12)
    wanted = (array - array.mean()) / (array.std(ddof=1) + 1e-4)
    assert np.allclose(advantages_of(group, "std"), wanted, rtol=1e-9, atol=1e-12)


@given(rewards, st.sampled_from(["std", "none"]))
def test_advantages_add_up_to_nothing_and_keep_the_order(group, scale):
    found = advantages_of(group, scale)
    size = max(map(abs, group)) + 1
    assert sum(found) == pytest.approx(0, abs=1e-6 if scale == "std" else 1e-9 * size)
    for i, a in enumerate(group):
        for j, b in enumerate(group):
            assert not (a > b and found[i] < found[j])


@given(rewards, st.integers(-1000, 1000), st.sampled_from(["std", "none"]))
def test_a_reward_for_all_changes_nothing(group, bonus, scale):
    whole = [float(round(r)) for r in group]
    shifted = advantages_of([r + bonus for r in whole], scale)
    assert shifted == pytest.approx(advantages_of(whole, scale), rel=1e-6, abs=1e-6)


@given(rewards, st.integers(0, 11), st.sampled_from(["std", "none"]))
def test_who_is_first_does_not_matter(group, turn, scale):
    turn %= len(group)
    turned = advantages_of(group[turn:] + group[:turn], scale)
    plain = advantages_of(group, scale)
    assert turned == pytest.approx(plain[turn:] + plain[:turn], rel=1e-9, abs=1e-9)


@given(lengths, st.sampled_from(["seq-mean-token-mean", "token-mean"]))
def test_all_tokens_together_weigh_one(rollouts, loss_agg_mode):
    assume(sum(rollouts) > 0)
    weights = token_weights(rollouts, loss_agg_mode, 7)
    assert sum(n * w for n, w in zip(rollouts, weights, strict=True)) == pytest.approx(1.0)
    assert all((w > 0) == (n > 0) for n, w in zip(rollouts, weights, strict=True))


@given(lengths, st.sampled_from(["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]))
def test_a_rollout_without_tokens_changes_nothing_for_the_others(rollouts, loss_agg_mode):
    assert token_weights([*rollouts, 0], loss_agg_mode, 9) == [*token_weights(rollouts, loss_agg_mode, 9), 0.0]


@given(lengths, st.integers(1, 100))
def test_the_constant_divisor_is_rollouts_times_max_tokens(rollouts, most):
    real = sum(1 for n in rollouts if n)
    for n, w in zip(rollouts, token_weights(rollouts, "seq-mean-token-sum-norm", most), strict=True):
        assert w == (pytest.approx(1 / (real * most)) if n else 0.0)
