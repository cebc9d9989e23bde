"""How far a judge agrees with labels, and with itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLED = 1000


def kappa(labels: Sequence[int], found: Sequence[int], choices: int) -> float:
    """Return Cohen's kappa; with more than two ordered choices the quadratically weighted one.

    Args:
        labels, found: [N] numbers of choices.

    Returns:
        NaN if both have only one and the same choice, so that nothing can be said.
    """
    counts = np.zeros((choices, choices))
    np.add.at(counts, (np.asarray(labels), np.asarray(found)), 1)
    observed = counts / counts.sum()
    expected = np.outer(observed.sum(1), observed.sum(0))
    places = np.arange(choices)
    distance = (places[:, None] - places[None, :]) ** 2
    chance = float((distance * expected).sum())
    return 1 - float((distance * observed).sum()) / chance if chance else float("nan")


def tau_b(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b of two orders of the same things; NaN if one has ties only."""
    a, b = np.asarray(first), np.asarray(second)
    signs_a, signs_b = np.sign(a[:, None] - a[None, :]), np.sign(b[:, None] - b[None, :])
    scale = np.sqrt((signs_a**2).sum() * (signs_b**2).sum())
    return float((signs_a * signs_b).sum() / scale) if scale else float("nan")


def interval(count: int, statistic: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of `count` things, of which it is given the indices."""
    draw = np.random.default_rng(0)
    values = [statistic(draw.integers(0, count, count).tolist()) for _ in range(RESAMPLED)]
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)
