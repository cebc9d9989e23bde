"""Whether algorithms differ: figures of textbooks, and enumeration written in another way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.runtime.scores import estimate
from palestra_lab.comparison.differences import MOST_EXACT, holm, paired_difference


def test_sleep_of_ten_patients_as_student_compared_it():
    """Student 1908, also in R's `t.test(extra ~ group, sleep, paired = TRUE)`: t = 4.0621, df = 9, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(second, first)
    assert found.estimate.mean == pytest.approx(1.58)
    assert found.estimate.mean - found.estimate.half == pytest.approx(0.7001142, abs=1e-6)
    assert found.p_t == pytest.approx(0.002833, abs=5e-7)
    # None of the nine differences that are not 0 is negative: only the observed signs and their opposite are as far
    # from 0, each twice, because the sign of the difference 0 is free.
    assert found.p_exact == pytest.approx(4 / 2**10)


@pytest.mark.parametrize(
    ("differences", "exact"),
    [([1.0, 1.0, 1.0, 1.0, 1.0], 2 / 32), ([1.0, -1.0], 1.0), ([3.0, 1.0], 2 / 4), ([2.0, 1.0, -1.0], 6 / 8)],
)
def test_the_exact_test_by_hand(differences, exact):
    assert paired_difference(differences, [0.0] * len(differences)).p_exact == pytest.approx(exact)


@pytest.mark.parametrize("pairs", [2, MOST_EXACT, MOST_EXACT + 1, 40])
def test_equal_differences_have_an_exact_p_however_many_there_are(pairs):
    """Of 2^n assignments of signs only that of all equal ones, and its opposite, are as far from 0."""
    found = paired_difference(
        [0.75 + seed * 0.1 for seed in range(pairs)], [0.25 + seed * 0.1 for seed in range(pairs)]
    )
    assert (found.p_t, found.p_exact) == (None, pytest.approx(2 / 2**pairs))
    assert found.p == found.p_exact
    same = paired_difference([0.5] * pairs, [0.5] * pairs)
    assert (same.p_t, same.p_exact, same.p) == (1.0, 1.0, 1.0)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9))
def test_the_exact_test_is_the_enumeration_of_all_signs(values):
    found = paired_difference([value / 7 for value in values], [0.0] * len(values))
    sums = np.array([0])
    for value in values:  # in integers, so that no sum is rounded
        sums = np.concatenate([sums + value, sums - value])
    assert found.p_exact == pytest.approx(np.mean(np.abs(sums) >= abs(sum(values))))


def test_equal_differences_have_no_t_test():
    assert paired_difference([1.0, 1.0], [1.0, 1.0]).p_t == 1.0
    assert paired_difference([0.3, 0.4, 0.5], [0.2, 0.3, 0.4]).p_t is None  # up to rounding, all differ by 0.1
    assert paired_difference([1.0], [0.0]).p_t is None
    assert paired_difference([0.0] * 20, [*[1.0] * 19, 0.5]).p_exact is None
    assert paired_difference([0.0] * MOST_EXACT, [1.0] * MOST_EXACT).p_exact == pytest.approx(2 / 2**MOST_EXACT)


def test_holm_by_hand():
    """Holm 1979: sorted 0.005, 0.01, 0.03, 0.04 are multiplied by 4, 3, 2, 1, and never fall."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_interval_and_the_test_err_as_often_as_they_say():
    draw = random.Random(0)
    outside = false = 0
    for _ in range(2000):
        values = [draw.gauss(0.0, 1.0) for _ in range(5)]
        found = estimate(values)
        outside += abs(found.mean) > found.half
        false += paired_difference(values, [0.0] * 5).p_t < 0.05
    assert outside == false  # the interval and the test are one statement
    assert outside / 2000 == pytest.approx(0.05, abs=0.015)  # three standard errors of the share
