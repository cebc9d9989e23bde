from __future__ import annotations

import math
import statistics

import pytest

from palestra.algorithms.baselines import centred_returns


def advantages_of(rewards, scale):
    """Of a group whose episodes have one value each."""
    return [found[0] for found in centred_returns([[reward] for reward in rewards], scale)]


def test_two_rewards_have_a_closed_form():
    """Mean 1/2, sample deviation 1/sqrt(2)."""
    wanted = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert advantages_of([0.0, 1.0], "std") == pytest.approx([-wanted, wanted], abs=1e-15)
    assert advantages_of([0.0, 1.0], "none") == [-0.5, 0.5]


@pytest.mark.parametrize("rewards", [[1, 2, 3, 4], [0, 0, 0, 1], [-5, 0.5, 100, 3.25], [1e-9, 0, 0], [1e6, 1e6 + 1]])
def test_advantages_are_those_of_the_paper(rewards):
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    wanted = [(r - mean) / (deviation + 1e-4) for r in rewards]
    assert advantages_of(rewards, "std") == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert advantages_of(rewards, "none") == pytest.approx([r - mean for r in rewards], rel=1e-12)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 1e9])
def test_a_group_of_one_has_nothing_to_be_compared_with(scale, reward):
    """Trap 2: mean 0 and deviation 1 would make the advantage the reward itself."""
    assert advantages_of([reward], scale) == [0.0]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e-20, 1e300])
def test_equal_rewards_have_no_advantage_exactly(scale, reward):
    """Exactly: 0.1 three times has a rounded mean that is not 0.1."""
    assert advantages_of([reward] * 7, scale) == [0.0] * 7


def test_an_empty_group_has_no_advantages():
    assert advantages_of([], "std") == []
