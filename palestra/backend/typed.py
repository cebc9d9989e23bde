"""Values of a message as the types that a method's annotations name, so that a wrong one never reaches the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from palestra.errors import InvalidRequest, PalestraError
from palestra.process.codec import SentError, made
from palestra.process.stub import Method

Arrays = Sequence[NDArray[Any]]
MOST_WHOLE = 2**64


def typed(hint: Any, value: Any, arrays: Arrays, where: str) -> Any:
    """Return a value of a message as its type.

    Args:
        hint: an annotation: records, arrays, numbers, texts, paths, and collections of these.

    Raises:
        InvalidRequest: the value is of another type; the message names the place.
    """

    def of(kind: Any, found: Any) -> Any:
        return _array(kind, found, arrays) if (get_origin(kind) or kind) is np.ndarray else made(kind, found)

    if "Any" not in str(hint):  # JSON that is only kept is left as it is
        _check_plain(value, where)
    try:
        return msgspec.convert(value, hint, dec_hook=of)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error).replace("`$", f"`{where}"), where) from error
    except RecursionError as error:
        raise InvalidRequest(f"{where} is nested too deep", where) from error


def arguments_of(method: Method, given: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the arguments of a call that came in a message by their names.

    Raises:
        InvalidRequest: one is missing, unknown or of another type.
    """
    try:
        method.signature.bind(**given)
    except TypeError as error:
        raise InvalidRequest(f"a call has {error}") from error
    return {name: typed(method.hints[name], value, arrays, name) for name, value in given.items()}


def error_of(sent: Any) -> PalestraError:
    """Return the error that came in a message as a `SentError`.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        error = msgspec.convert(sent, SentError).error()
    except msgspec.ValidationError as problem:
        raise InvalidRequest(f"no error: {problem}") from problem
    return error if isinstance(error, PalestraError) else PalestraError(str(error))


def _array(kind: Any, value: Any, arrays: Arrays) -> NDArray[Any]:
    """Return an array of the message, whose numbers are of the annotation's type."""
    number = value.get("array") if isinstance(value, dict) else None
    if type(number) is not int or not 0 <= number < len(arrays):
        raise ValueError("no array of this message")
    wanted = np.dtype(get_args(get_args(kind)[1])[0])
    if (found := arrays[number]).dtype != wanted:
        raise ValueError(f"an array of {found.dtype}, and not of {wanted}")
    return found


def _check_plain(value: Any, where: str) -> None:
    """Refuse a text that can't be stored or be a path, by a lone surrogate or NUL, and integers over 64 bits."""
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is dict:
            left.extend(one)
            left.extend(one.values())
        elif kind is list:
            left.extend(one)
        elif kind is str:
            if "\0" in one or not (one.isascii() or one.encode(errors="replace") == one.encode(errors="surrogatepass")):
                raise InvalidRequest(f"{where} has the text {one[:40]!r}, which can't be used", where)
        elif kind is int and not -MOST_WHOLE <= one <= MOST_WHOLE:
            raise InvalidRequest(f"{where} has an integer of more than 64 bits", where)
