"""Arguments of tool calls, compared by value: agents serialize JSON differently."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import orjson

_EXACT = range(-(2**63), 2**64)  # integers that orjson reads exactly; it turns all others into floats
_LONGEST = 20  # number of digits of the longest of them


class _Number(str):
    """The exact value of a number outside 64-bit integers, as text. Its `repr` differs from every JSON string's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def arguments_key(text: str) -> Hashable:
    """Return a key that is equal for two JSON texts of the same value.

    Key order, whitespace and escapes do not matter; of duplicate keys the last counts. Numbers are compared by exact
    decimal value: `1`, `1.0` and `10e-1` are equal, but any two different numbers differ, even if they are equal as
    64-bit floats. Text that is not JSON (`NaN`, a truncated object) equals only itself.
    """
    try:
        value = orjson.loads(text)
        if not _has_float(value):
            return _sorted(value)
    except (ValueError, TypeError):  # a number is too large for a float, or orjson reads deeper than it writes
        pass
    try:
        return _exact_key(text)
    except (ValueError, TypeError, RecursionError):  # not JSON, or half a surrogate pair, or nested too deep
        return text


def _exact_key(text: str) -> Hashable:
    """Return the key of a text with numbers that a float may round."""
    beyond: list[_Number] = []

    def number(written: str) -> int | _Number:
        read = _decimal(written)
        if isinstance(read, _Number):
            beyond.append(read)
        return read

    value = _decoder(number).decode(text)
    # Without such a number the text may still contain 1.0, which needs the same key as 1.
    return (True, repr(value)) if beyond else _sorted(value)


def _decoder(number: Callable[[str], int | _Number]) -> json.JSONDecoder:
    """Return a JSON decoder that reads numbers with `number`, refuses NaN and sorts keys."""
    return json.JSONDecoder(
        parse_int=number,
        parse_float=number,
        parse_constant=_refuse,
        object_pairs_hook=lambda pairs: dict(sorted(dict(pairs).items())),
    )


def _refuse(constant: str) -> NoReturn:
    """Raise an error for NaN and infinities, which Python's decoder would accept."""
    raise ValueError(f"{constant} is not JSON")


def _sorted(value: Any) -> bytes:
    """Return a value as compact JSON with sorted keys, for comparison."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _has_float(value: Any) -> bool:
    """Return whether a value contains a float, which the decoder may have rounded."""
    values = [value]
    while values:
        value = values.pop()
        if type(value) is dict:
            values.extend(value.values())
        elif type(value) is list:
            values.extend(value)
        elif type(value) is float:
            return True
    return False


def _decimal(written: str) -> int | _Number:
    """Return the exact value of a JSON number: an integer if orjson can read it, else digits and a power of ten."""
    mantissa, _, exponent = written.lower().removeprefix("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return 0
    if len(exponent) > _LONGEST:  # Python refuses to read integers of thousands of digits
        return _Number(written.lower())
    significant = digits.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(digits) - len(significant)
    sign = "-" if written[0] == "-" else ""
    if 0 <= power <= _LONGEST - len(significant) and (integer := int(sign + significant + "0" * power)) in _EXACT:
        return integer
    return _Number(f"{sign}{significant}e{power}")
