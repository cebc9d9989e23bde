"""What sequences of tokens have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """How many leading entries of two arrays, [N] and [M], are equal."""
    shortest = min(len(a), len(b))
    if not shortest:
        return 0
    different = a[:shortest] != b[:shortest]
    first = int(different.argmax())
    return first if different[first] else shortest


def starts_with(ids: NDArray[Any], beginning: NDArray[Any]) -> bool:
    """Whether `beginning` is the beginning of `ids`."""
    return len(beginning) <= len(ids) and np.array_equal(ids[: len(beginning)], beginning)
