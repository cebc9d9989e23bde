"""The confidence sequence and the watch: formulas against an oracle, and how often simulated gates are wrong."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.doctor.evidence import Evidence, e_cusum
from palestra_live.gate.statistics import ALPHA, FEWEST, STAKE, TIGHTEST, Differences, half_width, pairs_needed, watched

_spec = importlib.util.spec_from_file_location("gate_bench", Path(__file__).parents[3] / "bench" / "gate.py")
assert _spec is not None
assert _spec.loader is not None
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


def _summed(values):
    found = Differences()
    for value in values:
        found = found.add(value)
    return found


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=60))
@examples(30, 300)
def test_sums_give_the_interval_of_the_whole_list(values):
    low, high = bench.sequences(np.array([values]))
    assert _summed(values).interval == pytest.approx((low[0, -1], high[0, -1]))


def test_the_width_is_that_of_the_paper():
    rho = math.sqrt((-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / TIGHTEST)
    for t in (1, FEWEST, TIGHTEST, 100_000):
        inner = (t * rho**2 + 1) / (t**2 * rho**2) * 2 * math.log(math.sqrt(t * rho**2 + 1) / ALPHA)
        assert half_width(t) == pytest.approx(math.sqrt(inner))
    # It is wider than the interval of one look, and not three times as wide where it is tightest.
    assert 1.0 < half_width(TIGHTEST) / (1.96 / math.sqrt(TIGHTEST)) < 2.0


def test_it_says_nothing_before_it_may_and_never_more_than_can_be():
    assert _summed([1.0] * (FEWEST - 1)).interval == (-1.0, 1.0)
    low, high = _summed([1.0] * FEWEST).interval
    assert 0.0 < low < 1.0 == high
    with pytest.raises(ValueError, match=r"between.*-1.*1"):
        Differences().add(1.5)
    with pytest.raises(ValueError, match=r"between.*-1.*1"):
        Differences().add(math.nan)


@given(st.floats(0.01, 1.0), st.floats(0.05, 1.0))
@examples(30, 300)
def test_so_many_pairs_are_needed_and_not_one_less(gap, deviation):
    needed = pairs_needed(gap, deviation)
    assert deviation * half_width(needed) <= gap
    assert needed == FEWEST or deviation * half_width(needed - 1) > gap


def test_the_watch_is_the_cusum_of_the_paper():
    scores, height = [0.0, 1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0], 1.0
    evidence = Evidence(0.0, 0)
    for session, score in enumerate(scores):
        height = max(height, 1.0) * (1 + STAKE * (0.65 - score))
        evidence = watched(evidence, session, score, 0.65)
        assert evidence.nats == pytest.approx(math.log(height))
    assert evidence == e_cusum([math.log1p(STAKE * (0.65 - score)) for score in scores])


def _shares(live, new, pairs, versions):
    return [np.isfinite(ends).mean() for ends in bench.comparisons(live, new, pairs, versions, seed=11)]


def test_a_version_is_rarely_called_better_or_worse_than_itself():
    assert sum(_shares(0.6, 0.6, 3_000, 200)) <= 0.07


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_versions_that_rarely_differ_are_misjudged_in_at_most_one_of_twenty(share):
    """The new version only loses, in this share of all pairs: the first pairs are all equal."""
    differences = -1.0 * (np.random.default_rng(5).random((500, 1_500)) < share)
    low, high = bench.sequences(differences)
    missed = ((low > -share) | (high < -share))[:, FEWEST - 1 :].any(axis=1)
    assert missed.mean() <= ALPHA + 0.01


def test_a_better_version_is_promoted_and_a_worse_one_rejected():
    assert _shares(0.6, 0.7, 1_500, 100)[0] >= 0.95
    _, rejected = bench.comparisons(0.6, 0.4, 600, 100, seed=11)
    assert np.median(rejected) <= 150


def test_a_loss_is_found_soon():
    assert np.median(bench.alarms(0.4, 400, 100, seed=11)) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.1, 0.5, 0.6, 0.95])
def test_600_comparisons_of_a_version_with_itself_are_wrong_in_at_most_one_of_twenty(mean):
    assert sum(_shares(mean, mean, 10_000, 600)) <= ALPHA


@pytest.mark.slow
def test_ten_points_are_promoted_and_twenty_lost_rejected_in_time():
    assert _shares(0.6, 0.7, 1_500, 600)[0] >= 0.95
    assert _shares(0.6, 0.4, 1_500, 600)[1] == 1.0


@pytest.mark.slow
def test_of_100_good_streams_at_most_five_are_sent_back():
    assert sum(np.isfinite(bench.alarms(0.7, 10_000, 100, seed=11))) <= 5
    # At the floor itself the mean time to an alarm is at least 1,000 sessions, whatever the scores look like.
    assert np.mean(np.minimum(bench.alarms(0.65, 20_000, 200, seed=11), 20_000)) >= 1_000
