"""Bets against a null hypothesis: their mean under it, and the alarms of the detector that is made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from palestra.doctor.evidence import ALARM, BETS, FALSE_ALARMS, OPEN_BETS, e_cusum, log_e_value, log_e_value_of_counts


@pytest.mark.parametrize(
    ("least", "highest", "draw"),
    [
        (0.0, 1.0, lambda rng, size: rng.choice([-1.0, 1.0], size)),
        (0.3, 1.0, lambda rng, size: (rng.random(size) < 0.3).astype(float)),
        (0.5, 1.0, lambda rng, size: rng.random(size)),
        (-0.05, 0.0, lambda rng, size: -(rng.random(size) < 0.05).astype(float)),
    ],
)
def test_the_mean_of_an_e_value_is_at_most_one_where_the_hypothesis_is_just_true(least, highest, draw):
    rng = np.random.default_rng(7)
    found = [math.exp(log_e_value(draw(rng, 4).tolist(), least, highest)) for _ in range(20_000)]
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - 1.0) < 4 * error
    assert error < 0.1


def test_an_e_value_is_the_mean_of_its_bets():
    values, least, highest = [0.2, 0.9, 0.4], 0.6, 1.0
    bets = [math.prod(1 + bet * (least - value) / (highest - least) for value in values) for bet in BETS]
    assert log_e_value(values, least, highest) == pytest.approx(math.log(sum(bets) / len(bets)))
    assert log_e_value([], 0.0, 1.0) == 0.0


@pytest.mark.parametrize(("hits", "trials", "most"), [(0, 5, 0.05), (3, 12, 0.05), (7, 7, 0.6)])
def test_counts_are_short_for_their_trials(hits, trials, most):
    values = [-1.0] * hits + [0.0] * (trials - hits)
    assert log_e_value_of_counts(hits, trials, most) == pytest.approx(log_e_value(values, -most, 0.0))


@pytest.mark.parametrize("seed", range(20))
def test_the_cusum_is_the_best_of_the_bets_that_began_at_any_step(seed):
    values = np.random.default_rng(seed).normal(-0.1, 1.0, 50).tolist()
    found = e_cusum(values)
    sums = [sum(values[first:]) for first in range(50)]
    assert found.nats == pytest.approx(max(sums))
    assert sums[found.start] == pytest.approx(max(sums))


def test_alarms_without_a_change_are_as_rare_as_promised():
    """The average run length is at least exp(ALARM); the worst case of a bound that just holds is simulated."""
    rng = np.random.default_rng(3)
    alarms = steps = 0
    while steps < 20_000:
        nats = 0.0
        for _ in range(2000):
            steps += 1
            u = rng.choice([-1.0, 1.0], 4)
            bets = [float(np.log1p(-bet * u).sum()) for bet in BETS]
            nats = max(nats, 0.0) + float(np.logaddexp.reduce(bets)) - math.log(len(BETS))
            if nats >= ALARM:
                alarms += 1
                break
    assert alarms <= 2 * steps * FALSE_ALARMS / OPEN_BETS + 3
