"""Means with confidence intervals, and comparison of two algorithms: paired tests, corrected for their number.

All formulas are closed forms over a handful of numbers, so that no library of statistics is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

MOST_EXACT = 16  # pairs up to which all assignments of signs are enumerated: 65,536


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of independent values, such as one per seed, task or game.

    Attributes:
        half: half the width of the 95 confidence interval of the mean, by Student's t; None: there is only one value.
    """

    mean: float
    half: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two algorithms over their common seeds.

    Attributes:
        estimate: mean of the differences, with its interval.
        p_t: two-sided p of the paired t-test; None: only one pair, or all differences are equal and not 0.
        p_exact: two-sided p of the exact permutation of signs; None: over `MOST_EXACT` pairs, unless all differences
            are equal. At least one of the two exists.
    """

    estimate: Estimate
    p_t: float | None
    p_exact: float | None

    @property
    def p(self) -> float:
        """Return the p of the t-test or, without one, the exact p."""
        p = self.p_exact if self.p_t is None else self.p_t
        assert p is not None
        return p


def student_t(t: float, degrees: int) -> float:
    """Return the probability that Student's t is between -t and t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).

    Args:
        t: at least 0.
        degrees: at least 1.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if degrees % 2 else 1.0
    total = 0.0 if degrees == 1 else term
    # The exponents of the cosine are odd for odd degrees of freedom, and even for even ones, up to degrees - 2.
    for power in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the t for which Student's t is between -t and t with this probability, by bisection.

    Args:
        probability: at least 0, below 1.
        degrees: at least 1.
    """
    low, high = 0.0, 1.0
    while student_t(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, with its 95 interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t_quantile(0.95, count - 1) * _standard_error(values), count)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two algorithms by the differences `first - second`, seed by seed.

    Both have values for the same seeds in the same order, at least one.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    found = estimate(differences)
    return Difference(found, _paired_t(differences), _sign_permutation(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm 1979), in the given order.

    The probability of even one false difference among all of them is at most the significance level.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = largest
    return corrected


def _standard_error(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _are_equal(differences: Sequence[float]) -> bool:
    """Return whether all differences are equal, but for rounding."""
    error = _standard_error(differences) if len(differences) > 1 else 0.0
    return error <= 1e-12 * max(map(abs, differences))


def _paired_t(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of the t-test that the mean of the differences is 0."""
    if not any(differences):
        return 1.0
    if _are_equal(differences):  # there is no variance from which the test could judge
        return None
    error = _standard_error(differences)
    t = abs(math.fsum(differences) / len(differences)) / error
    return max(0.0, 1.0 - student_t(t, len(differences) - 1))


def _sign_permutation(differences: Sequence[float]) -> float | None:
    """Return the share of all assignments of signs whose sum is at least as far from 0 as the observed one."""
    if not any(differences):
        return 1.0
    if _are_equal(differences):  # only the observed signs and their opposite are as far from 0
        return 2.0 ** (1 - len(differences))
    if len(differences) > MOST_EXACT:
        return None
    observed = abs(math.fsum(differences))
    bound = observed - 1e-9 * math.fsum(map(abs, differences))  # sums of the same numbers differ by rounding
    signs = itertools.product((1.0, -1.0), repeat=len(differences))
    found = sum(abs(math.fsum(s * d for s, d in zip(each, differences, strict=True))) >= bound for each in signs)
    return found / float(1 << len(differences))
