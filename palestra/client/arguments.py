"""Numbers that a user gives to a function of this package, checked before anything begins, each under its name."""

from __future__ import annotations

import math
import operator
from typing import Any

from palestra.errors import ConfigError


def checked_count(name: str, value: Any, least: int = 1) -> int:
    """Return an integer, including numpy's, as an `int`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ConfigError(f"`{name}` is {value!r}; give a whole number of at least {least}")
    return number


def checked_amount(name: str, value: Any, *, above_zero: bool = False, endless: bool = False) -> float:
    """Return a number, such as seconds or cores, as a `float`.

    Args:
        above_zero: whether to refuse 0.
        endless: whether to allow infinity.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0 or (above_zero and number == 0) or (number == math.inf and not endless):
        wanted = "a number above 0" if above_zero else "a number of at least 0"
        raise ConfigError(f"`{name}` is {value!r}; give {wanted}")
    return number
