"""Values of users as JSON: scalars and arrays of numpy and torch, dates and decimals; and frames as rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from typing import Any

from palestra.errors import ConfigError, InvalidRequest


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
    """Return a number, such as seconds or cores, as a `float`."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0 or (above_zero and number == 0) or (number == math.inf and not endless):
        wanted = "a number above 0" if above_zero else "a number of at least 0"
        raise ConfigError(f"`{name}` is {value!r}; give {wanted}")
    return number


_MOST = 2**63  # integers are stored in 64 bits, signed or not
_SCALARS = frozenset({str, int, bool, type(None)})
ROWS = 1000  # of a frame that are objects at the same time
_MISSING = ("NAType", "NaTType")  # pandas' types of missing values


def plain_object(value: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return an object with values converted to JSON where possible.

    Scalars and arrays become numbers and lists, dates and times ISO 8601 texts, decimals and fractions floats.
    """
    try:
        return {_key(key, place): _plain(one, f"{place}: {key!r}") for key, one in value.items()}
    except RecursionError:
        raise InvalidRequest(f"{place} is nested too deeply, or contains itself", place) from None


def rows_of_frame(tasks: Any) -> Any:
    """Return the rows of a pandas or polars DataFrame, or a pyarrow table, lazily; other objects are unchanged.

    A missing value is None.
    """
    if hasattr(tasks, "iter_rows") and hasattr(tasks, "columns"):
        return tasks.iter_rows(named=True)
    if hasattr(tasks, "iloc") and hasattr(tasks, "to_dict"):
        parts = (tasks.iloc[start : start + ROWS] for start in range(0, len(tasks), ROWS))
        rows = (row for part in parts for row in part.to_dict("records"))
        return ({key: _missing_as_none(value) for key, value in row.items()} for row in rows)
    if hasattr(tasks, "to_batches") and hasattr(tasks, "column_names"):
        return (row for part in tasks.to_batches(ROWS) for row in part.to_pylist())
    return tasks


def _missing_as_none(value: Any) -> Any:
    is_missing = type(value).__name__ in _MISSING or (isinstance(value, float) and math.isnan(value))
    return None if is_missing else value


def _key(key: Any, place: str) -> str:
    if not isinstance(key, str):
        raise _refused(place, f"has the key {key!r:.60}", key, "keys are texts: write str(key)")
    return str.__str__(key)


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, place)
    if isinstance(value, int):
        if not -_MOST <= value < 2 * _MOST:
            raise _refused(place, f"is {value!r:.60}", value, "an integer has at most 64 bits: give it as a text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(place, f"is {value}", value, "a number is finite: give None for a missing value")
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, place): _plain(one, f"{place}, {key!r}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{place}, {number}") for number, one in enumerate(value)]
    return _converted(value, place)


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(place, f"is {value!r:.60}", value, "it has half of a character: repair or remove it") from None
    return str.__str__(value)  # of an enum that is a text, `str` returns the member's name


def _converted(value: Any, place: str) -> Any:
    """Return the JSON form of a value that is not a JSON type."""
    if type(value).__name__ in _MISSING:
        raise _refused(place, "is missing", value, "give None")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | Fraction):
        number = float(value)
        if not math.isfinite(number) or type(value)(repr(number)) != value:
            raise _refused(place, f"is {value!r:.60}", value, "no float is equal to it: give float(…) or str(…)")
        return number
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        found = value.tolist()
        if found is not value and not hasattr(found, "tolist"):
            kind = str(value.dtype)
            if kind.startswith("datetime64"):
                found = value.astype("datetime64[us]").tolist()
            if not kind.startswith("timedelta64") and found is not None and (isinstance(found, list) or _finite(found)):
                return _plain(found, place)
    raise _refused(place, f"is {value!r:.60}", value, "give text, a number, true, false, None, a list or an object")


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _refused(place: str, what: str, value: Any, remedy: str) -> InvalidRequest:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return InvalidRequest(f"{place} {what}, of the type {name}, which can't be stored; {remedy}", place)


def plain_task(task: Any, number: int, name: str) -> dict[str, Any]:
    """Return one of several tasks as a JSON object. Raises InvalidRequest if it is no object, or has a value without a
    form in JSON.
    """
    if not isinstance(task, Mapping):
        raise InvalidRequest(
            f"a task is a JSON object, such as {{'prompt': {str(task)[:40]!r}}}; {name}, task {number}, {task!r:.60}, "
            f"is a {type(task).__name__}",
            name,
        )
    own = task.get("id")
    said = f" (id {own!r:.60})" if isinstance(own, str | int) else ""
    return plain_object(task, f"{name}, task {number}{said}")


def is_json(value: Any) -> bool:
    """Return whether `orjson.dumps` writes a value, or raises a TypeError, as `plain_object` would take it."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is dict:
        return _SCALARS.issuperset(map(type, value.values())) or all(map(is_json, value.values()))
    return kind is list and all(map(is_json, value))
