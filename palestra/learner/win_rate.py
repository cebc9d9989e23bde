"""The share of tasks at which one version beats another, with an interval that holds for few tasks and many ties."""

from __future__ import annotations

import math
from typing import NamedTuple

NORMAL_95 = 1.959963984540054
_HALVINGS = 50  # of the range in which a bound lies: to 1e-15


class WinRate(NamedTuple):
    """The mean over tasks of 1 for a win, 0.5 for a tie and 0 for a loss, with its 95 % interval."""

    mean: float
    low: float
    high: float


def win_rate(wins: int, losses: int, tasks: int) -> WinRate:
    """Return the win rate of at least one task; what is neither won nor lost is a tie.

    The interval is the score interval of a difference of paired proportions (Tango 1998, Statistics in Medicine 17,
    891-908): all differences that a score test at 5 % does not reject. Without ties it is Wilson's.
    """
    difference = (wins - losses) / tasks

    def bound(end: float, sign: int) -> float:
        inside, outside = difference, end
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if sign * _score(wins, losses, tasks, middle) < NORMAL_95:
                inside = middle
            else:
                outside = middle
        return (1 + inside) / 2

    return WinRate((1 + difference) / 2, bound(-1.0, 1), bound(1.0, -1))


def _score(wins: int, losses: int, tasks: int, difference: float) -> float:
    """Return the score statistic of a difference; the probability of a loss is estimated under it."""
    b = (2 * tasks - wins + losses) * difference - wins - losses
    lost = (math.sqrt(b * b + 8 * tasks * losses * difference * (1 - difference)) - b) / (4 * tasks)
    variance = tasks * (2 * lost + difference * (1 - difference))
    excess = wins - losses - tasks * difference
    return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)
