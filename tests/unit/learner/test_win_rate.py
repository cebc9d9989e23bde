"""The interval of a win rate: its exact coverage, Wilson's interval, and a search for where the test rejects."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest

from palestra.learner.evaluation import WinRate, win_rate
from palestra.types.metrics import NORMAL_95


@cache
def intervals(tasks: int) -> dict[tuple[int, int], WinRate]:
    return {
        (wins, losses): win_rate(wins, losses, tasks)
        for wins, losses in product(range(tasks + 1), repeat=2)
        if wins + losses <= tasks
    }


def coverage(tasks: int, rate: float, ties: float) -> float:
    """The probability that the interval has the true rate, over all outcomes."""
    won, lost = rate - ties / 2, 1 - rate - ties / 2
    return math.fsum(
        math.comb(tasks, wins) * math.comb(tasks - wins, losses) * won**wins * lost**losses
        * ties ** (tasks - wins - losses)
        for (wins, losses), found in intervals(tasks).items()
        if found.low <= rate + 1e-12 and found.high >= rate - 1e-12
    )  # fmt: skip


@pytest.mark.parametrize("tasks", [5, 8, 12, 20])
def test_the_interval_holds_the_true_rate_at_few_tasks_with_and_without_ties(tasks):
    found = [
        coverage(tasks, rate, ties)
        for ties in (0.0, 0.2, 0.5, 0.8)
        for rate in (n / 20 for n in range(2, 19))
        if ties / 2 <= min(rate, 1 - rate) - 1e-9
    ]
    assert min(found) >= 0.91
    assert 0.95 <= math.fsum(found) / len(found) <= 0.975


def test_without_ties_it_is_wilsons_interval():
    for wins in range(11):
        share, square = wins / 10, NORMAL_95**2
        middle = (share + square / 20) / (1 + square / 10)
        half = NORMAL_95 * math.sqrt(share * (1 - share) / 10 + square / 400) / (1 + square / 10)
        assert win_rate(wins, 10 - wins, 10) == pytest.approx((share, middle - half, middle + half), abs=1e-9)


@pytest.mark.parametrize(("wins", "losses", "tasks"), [(12, 2, 50), (3, 3, 9), (1, 4, 30), (6, 1, 7)])
def test_each_bound_is_where_the_score_test_rejects(wins, losses, tasks):
    """The other parameter is estimated by a search for the largest likelihood."""

    def statistic(difference: float) -> float:
        def likelihood(lost: float) -> float:
            shares = (lost + difference, lost, 1 - 2 * lost - difference)
            counts = (wins, losses, tasks - wins - losses)
            return math.fsum(n * math.log(share) for n, share in zip(counts, shares, strict=True) if n)

        low, high = max(0.0, -difference) + 1e-13, (1 - difference) / 2 - 1e-13
        for _ in range(200):
            third = (high - low) / 3
            if likelihood(low + third) < likelihood(high - third):
                low += third
            else:
                high -= third
        variance = 2 * low + difference - difference**2
        return (wins - losses - tasks * difference) / math.sqrt(tasks * variance)

    found = win_rate(wins, losses, tasks)
    assert statistic(2 * found.low - 1) == pytest.approx(NORMAL_95, abs=1e-5)
    assert statistic(2 * found.high - 1) == pytest.approx(-NORMAL_95, abs=1e-5)


def test_ties_narrow_it_and_both_sides_are_alike():
    assert win_rate(0, 0, 8).mean == 0.5
    spans = [win_rate(each, each, 40) for each in (0, 5, 10, 20)]
    widths = [span.high - span.low for span in spans]
    assert widths == sorted(widths)
    for wins, losses in ((3, 1), (0, 7), (5, 0)):
        one, other = win_rate(wins, losses, 9), win_rate(losses, wins, 9)
        assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low), abs=1e-12)
        assert 0.0 <= one.low < one.mean + 1e-12
        assert one.mean - 1e-12 < one.high <= 1.0
