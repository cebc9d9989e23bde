"""Numbers that a user gives to a function of this package, checked before anything begins, each under its name."""

from __future__ import annotations

import math
import operator
from typing import Any

from palestra.errors import ConfigError


def checked_count(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number, also one of numpy's, as an `int`.

    Raises:
        ConfigError: it is no whole number, or is smaller.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ConfigError(f"`{name}` is {value!r}; give a whole number of at least {least}")
    return number


def checked_amount(name: str, value: Any, *, above_zero: bool = False, endless: bool = False) -> float:
    """Return a number of seconds, cores or the like as a `float`.

    Args:
        above_zero: whether 0 is refused as well.
        endless: whether it may be infinite.

    Raises:
        ConfigError: it is no number, or NaN, or smaller than 0.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0 or (above_zero and number == 0) or (number == math.inf and not endless):
        wanted = "a number above 0" if above_zero else "a number of at least 0"
        raise ConfigError(f"`{name}` is {value!r}; give {wanted}")
    return number
