"""Values of a message as the types that a method's annotations name, so that a wrong one never reaches the model."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from palestra.errors import InvalidRequest

Arrays = Sequence[NDArray[Any]]
MOST_WHOLE = 2**64


def typed(hint: Any, value: Any, arrays: Arrays, where: str) -> Any:
    """Return a value of a message as its type.

    Args:
        hint: an annotation: records, arrays, numbers, texts, paths, and collections of these.

    Raises:
        InvalidRequest: the value is of another type; the message names the place.
    """
    if hint is Any:
        return value
    if hint is None or hint is type(None):
        return _check(value is None, value, where, "null")
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _one_of(hint, value, arrays, where)
    if origin is Literal:
        return _check(value in get_args(hint), value, where, f"one of {get_args(hint)}")
    if origin is np.ndarray or hint is np.ndarray:
        return _array(hint, value, arrays, where)
    if origin is not None:
        return _collection(origin, get_args(hint), value, arrays, where)
    return _single(hint, value, arrays, where)


def _single(hint: type, value: Any, arrays: Arrays, where: str) -> Any:
    """Return a number, a text or a record."""
    if hint in (int, float):
        whole = type(value) is int and abs(value) <= MOST_WHOLE
        return hint(_check(whole or type(value) is hint, value, where, f"{hint.__name__} of 64 bits"))
    if hint is bool:
        return _check(isinstance(value, bool), value, where, "bool")
    if hint in (str, Path):
        return hint(_check(isinstance(value, str) and _is_text(value), value, where, "a text"))
    if issubclass(hint, BaseModel):
        try:
            return hint.model_validate(value)
        except ValidationError as error:
            raise InvalidRequest(f"{where}: {error.errors()[0]['msg']}", where) from error
    if is_dataclass(hint):
        return _record(hint, _check(isinstance(value, dict), value, where, "a record"), arrays, where)
    if issubclass(hint, tuple):  # a NamedTuple
        hints = _hints(hint)
        _check(isinstance(value, list) and len(value) == len(hints), value, where, f"{len(hints)} values")
        named = zip(hints.items(), value, strict=True)
        return hint(*(typed(one, part, arrays, f"{where}.{name}") for (name, one), part in named))
    raise TypeError(f"{where} has the type {hint}, which no message can hold")


def _record(hint: Any, value: dict[str, Any], arrays: Arrays, where: str) -> Any:
    """Return a dataclass."""
    hints = _hints(hint)
    if unknown := value.keys() - hints.keys():
        raise InvalidRequest(f"{where} has no {min(unknown)!r}", where)
    for field in fields(hint):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in value:
            raise InvalidRequest(f"{where} lacks {field.name!r}", where)
    return hint(**{name: typed(hints[name], one, arrays, f"{where}.{name}") for name, one in value.items()})


def _collection(origin: Any, inner: tuple[Any, ...], value: Any, arrays: Arrays, where: str) -> Any:
    """Return a mapping as a dict, and any other collection as a list or tuple."""
    if issubclass(origin, Mapping):
        _check(isinstance(value, dict), value, where, "a table")
        return {
            typed(inner[0], key, arrays, where): typed(inner[1], one, arrays, f"{where}.{key}")
            for key, one in value.items()
        }
    if not issubclass(origin, Collection):
        raise TypeError(f"{where} has the type {origin}, which no message can hold")
    _check(isinstance(value, list), value, where, "a list")
    if origin is tuple and inner[-1] is not Ellipsis:
        _check(len(value) == len(inner), value, where, f"{len(inner)} values")
        hints = inner
    else:
        hints = (inner[0],) * len(value)
    found = [typed(hint, one, arrays, f"{where}.{n}") for n, (hint, one) in enumerate(zip(hints, value, strict=True))]
    return found if origin is list else tuple(found)


def _one_of(hint: Any, value: Any, arrays: Arrays, where: str) -> Any:
    """Return the value as the first type of a union that it can be."""
    first: InvalidRequest | None = None
    for one in get_args(hint):
        if one is type(None):
            if value is None:
                return None
            continue
        try:
            return typed(one, value, arrays, where)
        except InvalidRequest as error:
            first = first or error
    raise first or InvalidRequest(f"{where} is missing", where)


def _array(hint: Any, value: Any, arrays: Arrays, where: str) -> NDArray[Any]:
    """Return an array of the message, whose numbers are of the annotation's type."""
    number = value.get("array") if isinstance(value, dict) else None
    if type(number) is not int or not 0 <= number < len(arrays):
        raise InvalidRequest(f"{where} is no array of this message", where)
    wanted = np.dtype(get_args(get_args(hint)[1])[0])
    found = arrays[number]
    if found.dtype != wanted:
        raise InvalidRequest(f"{where} is an array of {found.dtype}, and not of {wanted}", where)
    return found


def _is_text(value: str) -> bool:
    """Return whether a text can be stored and be a path: it has no lone surrogate, and no NUL."""
    return "\0" not in value and value.encode(errors="replace") == value.encode(errors="surrogatepass")


def _check(good: bool, value: Any, where: str, wanted: str) -> Any:
    if not good:
        raise InvalidRequest(f"{where} is {str(value)[:40]!r}, and not {wanted}", where)
    return value


@cache
def _hints(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint)
