"""Baselines: the values that returns are compared with to get advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from palestra.algorithms.credit import BaselineKey, Returns

# Added to the deviation of a group. TRL adds the same; it matters only where rewards are nearly equal.
EPSILON = 1e-4
# Share of the largest value by which equal values may differ: sums of the same rewards in another order, such as 0.1 +
# 0.2 and 0.3, differ in their last digits, and are nothing to learn from.
_ROUNDING = 1e-12

Compare = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""Turns the values of each of G episodes that have one baseline into advantages, in the same places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantages:
    """The advantages of one group.

    Attributes:
        by_key: for each episode, advantages by key of the return, including episodes without calls.
        by_call: for each episode, advantages by index of the call.
        calls_without_peers: number of calls whose baseline group occurs in no other episode; their advantage is 0.
    """

    by_key: list[dict[BaselineKey, float]]
    by_call: list[dict[int, float]]
    calls_without_peers: int


def group_advantages(returns_G: Sequence[Returns], compare: Compare) -> GroupAdvantages:
    """Return the advantages of a group's calls: each return compared with its baseline group. `compare` turns the
    values of one baseline group into advantages.
    """
    advantages: list[dict[BaselineKey, float]] = [{} for _ in returns_G]
    alone: set[str] = set()
    for baseline_group in sorted({key.baseline_group for returns in returns_G for key in returns.values}):
        keys = [[key for key in returns.values if key.baseline_group == baseline_group] for returns in returns_G]
        values = [[returns.values[key] for key in mine] for returns, mine in zip(returns_G, keys, strict=True)]
        # In one episode only: there is no other return to compare with, so the advantages are 0.
        if sum(map(bool, keys)) < 2:
            alone.add(baseline_group)
        for place, found in enumerate(compare(values)):
            advantages[place] |= zip(keys[place], found, strict=True)
    by_call = [
        {index: of_key[key] for index, key in returns.key_of.items()}
        for returns, of_key in zip(returns_G, advantages, strict=True)
    ]
    without = sum(key.baseline_group in alone for returns in returns_G for key in returns.key_of.values())
    return GroupAdvantages(by_key=advantages, by_call=by_call, calls_without_peers=without)


def centred_returns(values_G: Sequence[Sequence[float]], scale: Literal["std", "none"]) -> list[list[float]]:
    """Return (value - mean) / (deviation + 1e-4), or value - mean, for the values of a group; positions are kept.

    All values have one baseline, independent of their position: a baseline for each TimeStep would be biased if the
    policy decides when to stop. Episodes have equal weights, however many values they have. All advantages are 0 if the
    values are equal but for rounding, or if fewer than two episodes have values.

    Args:
        values_G: the values of each of G episodes: one reward, or one value per TimeStep or subagent; may be empty.
        scale: `std` divides by the sample standard deviation (ddof 1; DeepSeekMath, section 4.1.2), in which each value
            weighs 1 / (values of its episode); `none` does not (Liu et al. 2025, "Understanding R1-Zero-Like Training",
            3.1).
    """
    flat = np.array([value for values in values_G for value in values], np.float64)
    episodes = sum(1 for values in values_G if values)
    if episodes < 2 or _are_equal(flat):
        return [[0.0] * len(values) for values in values_G]
    shares = np.array([1.0 / (episodes * len(values)) for values in values_G for _ in values])
    centred = flat - (flat * shares).sum()
    if scale == "std":
        variance = (centred**2 * shares).sum() * episodes / (episodes - 1)
        centred = centred / (np.sqrt(variance) + EPSILON)
    found = iter(centred.tolist())
    return [[next(found) for _ in values] for values in values_G]


def left_out_returns(values_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each value minus the mean of the group's other episodes, which have equal weights; positions are kept.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to Basics". All
    advantages are 0 if the values are equal but for rounding, or if fewer than two episodes have values.
    """
    means = [float(np.mean(values)) for values in values_G if values]
    if len(means) < 2 or _are_equal(np.array([value for values in values_G for value in values], np.float64)):
        return [[0.0] * len(values) for values in values_G]
    total = float(np.sum(means))
    return [
        [value - (total - float(np.mean(values))) / (len(means) - 1) for value in values] if values else []
        for values in values_G
    ]


def _are_equal(values: NDArray[np.float64]) -> bool:
    """Return whether all values, [N] with N > 0, are equal but for rounding."""
    return bool(values.max() - values.min() <= _ROUNDING * np.abs(values).max())


def batch_advantages(groups: Sequence[Sequence[Returns]], compare: Compare) -> list[GroupAdvantages]:
    """Return the advantages of each group's calls, with returns compared over the whole batch. `compare` turns the
    values of one baseline group of the batch into advantages.
    """
    together = group_advantages([returns for group in groups for returns in group], compare)
    found, start = [], 0
    for group in groups:
        stop = start + len(group)
        found.append(
            GroupAdvantages(
                by_key=together.by_key[start:stop], by_call=together.by_call[start:stop], calls_without_peers=0
            )
        )
        start = stop
    if found:  # of the batch: there is no group in which such a call would be
        found[0] = replace(found[0], calls_without_peers=together.calls_without_peers)
    return found
