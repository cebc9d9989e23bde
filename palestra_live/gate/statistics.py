"""Statistics that stay valid however often they are looked at: a confidence sequence, and the watch after a promotion.

An ordinary 95 % interval that is looked at after every pair excludes the truth sooner or later. A confidence sequence
excludes it at any time with a probability of at most `ALPHA`, so a comparison may end as soon as it is decided.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from palestra.doctor.evidence import Evidence

ALPHA = 0.05  # a confidence sequence misses the truth, at any time, with at most this probability
TIGHTEST = 250  # the sequence is tightest at about this many pairs
FEWEST = 20  # the sequence is asymptotic: it says nothing before
# Added observations with the largest variance. If versions rarely differ, the first pairs are equal, and the variance
# looks too small: with one such observation the sequence misses the truth in up to 10 % of all cases.
ADDED = 3
STAKE = 0.8  # of the watch, a unit of score
WATCH_ALARM = math.log(1_000)  # nats; with a mean at its floor a watch runs 1,000 sessions on average, or more
_SPREAD = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / TIGHTEST  # rho squared, see `half_width`


class ConfidenceSequence(NamedTuple):
    """A confidence sequence at one moment: both ends, inclusive."""

    low: float
    high: float


class Differences(NamedTuple):
    """Sums over differences between two versions, each from -1 to 1; a new one for each difference that is added.

    Attributes:
        size: number of differences.
        total: their sum.
        squares: sum of their squares.
    """

    size: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, difference: float) -> Differences:
        """Return the sums with one more difference.

        Raises:
            ValueError: it is not between -1 and 1.
        """
        if not -1.0 <= difference <= 1.0:
            raise ValueError(f"a difference of scores lies between -1 and 1, not {difference}")
        return Differences(self.size + 1, self.total + difference, self.squares + difference * difference)

    @property
    def mean(self) -> float:
        """Return the mean difference; 0 without any."""
        return self.total / self.size if self.size else 0.0

    @property
    def deviation(self) -> float:
        """Return the standard deviation of a difference, with `ADDED`."""
        return math.sqrt(max(ADDED + self.squares - self.total * self.mean, 0.0) / (self.size + ADDED))

    @property
    def interval(self) -> ConfidenceSequence:
        """Return the confidence sequence of the mean difference; [-1, 1] before `FEWEST` differences."""
        if self.size < FEWEST:
            return ConfidenceSequence(-1.0, 1.0)
        half = self.deviation * half_width(self.size)
        return ConfidenceSequence(max(self.mean - half, -1.0), min(self.mean + half, 1.0))


def half_width(count: int) -> float:
    """Return half the width of the confidence sequence after `count` values with a standard deviation of 1.

    It is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (arXiv 2103.06476,
    Theorem 2.2): sqrt(2 (t rho^2 + 1) / (t^2 rho^2) ln(sqrt(t rho^2 + 1) / alpha)). The rho of `TIGHTEST` pairs is
    that of their section 2: rho^2 = (-2 ln alpha + ln(-2 ln alpha) + 1) / t.
    """
    grown = count * _SPREAD + 1
    return math.sqrt(2 * grown / (count * count * _SPREAD) * math.log(math.sqrt(grown) / ALPHA))


def pairs_needed(gap: float, deviation: float) -> int:
    """Return how many pairs it takes until the sequence is narrower than a gap: half its width is at most `gap`.

    Args:
        gap: between the true difference and the margin, above 0.
        deviation: standard deviation of a difference.
    """
    highest = FEWEST
    while deviation * half_width(highest) > gap:
        highest *= 2
    lowest = highest // 2 if highest > FEWEST else FEWEST
    while lowest < highest:
        middle = (lowest + highest) // 2
        lowest, highest = (lowest, middle) if deviation * half_width(middle) <= gap else (middle + 1, highest)
    return highest


def watched(evidence: Evidence, session: int, score: float, floor: float) -> Evidence:
    """Return the evidence that the mean score has fallen below a floor, after one more session.

    It is the e-CUSUM M <- max(M, 1) (1 + STAKE (floor - score)) of Shin, Ramdas and Rinaldo (arXiv 2203.03532,
    section 3), in logarithms. An alarm is due at `WATCH_ALARM`.

    Args:
        session: index of the session among those that were watched.
        score: from 0 to 1.
        floor: lowest mean that is no reason to go back, from 0 to 1.
    """
    return evidence.add(session, math.log1p(STAKE * (floor - score)))
