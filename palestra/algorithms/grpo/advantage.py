"""Advantages: a group's rewards are its own baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

EPSILON = 1e-4


def group_advantages(rewards_G: Sequence[float], scale: Literal["std", "none"]) -> list[float]:
    """(r - mean) / (deviation + 1e-4), or r - mean.

    Args:
        rewards_G: the rewards of the episodes of one group.
        scale: `std` divides by the sample standard deviation (ddof 1; DeepSeekMath, section 4.1.2), `none` does not
            (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.1).

    Returns:
        One advantage an episode. All are 0 where the rewards are equal, and for a group of one, which has nothing to
        be compared with.
    """
    return [advantages[0] for advantages in unit_advantages([[reward] for reward in rewards_G], scale)]


def unit_advantages(values_G: Sequence[Sequence[float]], scale: Literal["std", "none"]) -> list[list[float]]:
    """The same where an episode has several values: one a TimeStep, or one a subagent.

    All values of the group have one baseline, whatever their place: a baseline of each TimeStep would be biased where
    the policy decides when to stop. Episodes weigh the same, however many values they have.

    Args:
        values_G: the values of each episode of one group; an episode may have none.
        scale: as above; the deviation is of the values, each weighing 1 / (values of its episode).

    Returns:
        One advantage a value, in the same places. 0 where fewer than two episodes have values.
    """
    flat = np.array([value for values in values_G for value in values], np.float64)
    episodes = sum(1 for values in values_G if values)
    if episodes < 2 or flat.max() == flat.min():
        return [[0.0] * len(values) for values in values_G]
    shares = np.array([1.0 / (episodes * len(values)) for values in values_G for _ in values])
    centred = flat - (flat * shares).sum()
    if scale == "std":
        variance = (centred**2 * shares).sum() * episodes / (episodes - 1)
        centred = centred / (np.sqrt(variance) + EPSILON)
    found = iter(centred.tolist())
    return [[next(found) for _ in values] for values in values_G]
