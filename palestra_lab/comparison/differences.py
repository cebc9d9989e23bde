"""Whether two algorithms differ over their common seeds: closed forms over a handful of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.runtime.scores import Estimate, estimate, standard_error, student_t

MOST_EXACT = 16  # pairs up to which all assignments of signs are enumerated: 65,536


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


def _are_equal(differences: Sequence[float]) -> bool:
    """Return whether all differences are equal, but for rounding."""
    error = standard_error(differences) if len(differences) > 1 else 0.0
    return error <= 1e-12 * max(map(abs, differences))


def _paired_t(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of the t-test that the mean of the differences is 0."""
    if not any(differences):
        return 1.0
    if _are_equal(differences):  # there is no variance from which the test could judge
        return None
    error = standard_error(differences)
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
