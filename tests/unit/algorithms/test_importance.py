"""Importance correction, against the definition written out token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palestra.algorithms.policy_gradient import importance_weights
from unit.building import make_sample

MODES = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
logs = st.floats(-3, 0, width=32)


@st.composite
def rows(draw):
    """Rows of two episodes; calls may stand in several rows of their episode. With them, new logprobs."""
    samples, now = [], []
    for number in range(draw(st.integers(1, 4))):
        n = draw(st.integers(2, 8))
        trained = sorted(draw(st.sets(st.integers(1, n - 1))))
        old = draw(st.lists(logs, min_size=len(trained), max_size=len(trained)))
        sample = make_sample(list(range(n)), trained, weight=0.5, logprobs=old, name=f"episode {number % 2}")
        calls = sample.calls.copy()
        calls[sample.loss_mask] = draw(st.lists(st.integers(0, 2), min_size=len(trained), max_size=len(trained)))
        row = np.full(n, np.nan, np.float32)
        row[sample.loss_mask] = draw(st.lists(logs, min_size=len(trained), max_size=len(trained)))
        samples.append(replace(sample, calls=calls))
        now.append(row)
    return samples, now


def expected(samples, now, mode: str, limit: float) -> list[list[float]]:
    """For each row the weights of its trained tokens."""

    def log_ratio(row: int, place: int) -> float:
        return float(now[row][place]) - float(samples[row].logprobs[place])

    found = []
    for i, sample in enumerate(samples):
        weights = []
        for place in np.flatnonzero(sample.loss_mask):
            log = log_ratio(i, place)
            if mode.startswith("sequence"):
                log = sum(
                    log_ratio(j, other)
                    for j, peer in enumerate(samples)
                    if peer.episode_id == sample.episode_id
                    for other in np.flatnonzero(peer.loss_mask)
                    if peer.calls[other] == sample.calls[place]
                )
            assume(abs(abs(log) - math.log(limit)) > 1e-4)  # at the limit itself rounding decides
            ratio = math.exp(log)
            if mode.endswith("mask"):
                weights.append(0.5 * (ratio if 1 / limit <= ratio <= limit else 0.0))
            else:
                weights.append(0.5 * min(ratio, limit))
        found.append(weights)
    return found


@given(rows(), st.sampled_from(MODES), st.sampled_from([1.5, 2.0, 8.0]))
def test_weights_are_those_of_the_definition(drawn, mode, limit):
    samples, now = drawn
    found = importance_weights(samples, now, mode, limit)
    wanted = expected(samples, now, mode, limit)
    for sample, factors, weights in zip(samples, found.weights, wanted, strict=True):
        np.testing.assert_allclose((sample.loss_weights * factors)[sample.loss_mask], weights, rtol=1e-4)
        assert np.isfinite(factors).all()
        assert factors.dtype == np.float32


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_it_changes_nothing(mode):
    sample = make_sample([1, 2, 3, 4], [2, 3], weight=0.25, logprobs=[-0.5, -1.5])
    found = importance_weights([sample], [sample.logprobs], mode, 2.0)
    assert (found.weights[0] == 1.0).all()
    assert found.metrics == {"importance_mean": 1.0, "importance_limited": 0.0}


def test_what_it_did_is_reported():
    sample = make_sample([1, 2, 3, 4, 5], [1, 2, 3, 4], logprobs=[-1.0, -1.0, -1.0, -1.0])
    now = np.array([np.nan, -1.0 + math.log(3), -1.0 - math.log(3), -1.0, -1.0], np.float32)
    for mode, share in (("token-truncate", 0.25), ("token-mask", 0.5)):
        metrics = importance_weights([sample], [now], mode, 2.0).metrics
        assert metrics["importance_limited"] == share
        assert metrics["importance_mean"] == pytest.approx((3 + 1 / 3 + 2) / 4, rel=1e-6)


def test_a_token_that_has_become_far_more_probable_stays_finite():
    sample = make_sample([1, 2], [1], logprobs=[-900.0])
    found = importance_weights([sample], [np.array([np.nan, -0.1], np.float32)], "token-truncate", 2.0)
    assert found.weights[0][1] == 2.0
    assert math.isfinite(found.metrics["importance_mean"])


def test_no_rows_are_no_rows():
    assert importance_weights([], [], "sequence-mask", 2.0).weights == []
