"""Evidence against a null hypothesis that grows from step to step, with a bounded rate of false alarms.

An e-value is a number of at least 0 whose mean is at most 1 if the null hypothesis is true. Multiplied from step to
step, e-values are a bet against the hypothesis, which wins only where it is false. An e-detector (Shin, Ramdas and
Rinaldo, arXiv 2203.03532) begins a bet at every step. Its CUSUM follows the best of them, and an alarm at the height A
comes, on average, no sooner than after A steps without a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BETS = (0.25, 0.5, 0.75)  # shares of the stake; a small one wins more where evidence is weak, a large one where strong
FALSE_ALARMS = 1e-3  # of all bets together in a step without a change: one alarm in a thousand steps
OPEN_BETS = 7  # of the six signs: `audit_diverges` has two; those of single named rewards share one
ALARM = math.log(OPEN_BETS / FALSE_ALARMS)  # nats


def log_e_value(values: Sequence[float], least: float, highest: float) -> float:
    """Return the logarithm of an e-value against "each value has a mean of at least `least`, given those before it".

    It is the mean of several bets, each of which is a product over the values of 1 + share (least - value) / (highest -
    least). To bet on large values, negate them and the bounds.

    Args:
        values: independent, or each with this mean given the others; at most `highest`.
    """
    return _log_mean([sum(math.log1p(bet * (least - value) / (highest - least)) for value in values) for bet in BETS])


def log_e_value_of_counts(hits: float, trials: float, most: float) -> float:
    """Return the logarithm of an e-value against "each trial is a hit with a probability of at most `most`"."""
    return _log_mean([hits * math.log1p(bet * (1 - most) / most) + (trials - hits) * math.log1p(-bet) for bet in BETS])


def _log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of a mean of numbers that are given by their logarithms."""
    most = max(logs)
    return most + math.log(sum(math.exp(one - most) for one in logs) / len(logs))


class Evidence(NamedTuple):
    """What a CUSUM has found.

    Attributes:
        nats: the logarithm of its height.
        start: index of the step with which its present bet began: where the change is likely to be.
    """

    nats: float
    start: int

    @property
    def is_alarm(self) -> bool:
        """Return whether it has reached the height of an alarm."""
        return self.nats >= ALARM

    def add(self, index: int, log_e_value: float) -> Evidence:
        """Return the state after one more step: M <- max(M, 1) e."""
        return Evidence(self.nats + log_e_value, self.start) if self.nats > 0.0 else Evidence(log_e_value, index)


def e_cusum(log_e_values: Sequence[float]) -> Evidence:
    """Return the state of the CUSUM after the newest of some steps."""
    evidence = Evidence(0.0, 0)
    for index, value in enumerate(log_e_values):
        evidence = evidence.add(index, value)
    return evidence
