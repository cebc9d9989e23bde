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
    rewards = np.asarray(rewards_G, np.float64)
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return [0.0] * len(rewards)
    centred = rewards - rewards.mean()
    if scale == "std":
        centred = centred / (rewards.std(ddof=1) + EPSILON)
    return [float(a) for a in centred]
