"""Encoding of values for another process: msgpack of records, numbers, texts, paths, numpy arrays and pydantic models.

Values are decoded by annotation; a value of another type is refused with its path. Errors of Palestra and Python keep
their class.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from palestra import errors
from palestra.errors import InvalidRequest, PalestraError

_DTYPES = {np.dtype(name).str: np.dtype(name) for name in ("bool", "u1", "<i4", "<i8", "<f4", "<f8")}
MOST_DIMENSIONS = 8  # of an array; the time for the product of its sizes grows with the square of their number
_KNOWN: dict[str, type[Exception]] = {
    name: kind
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup)
}
_protocols: dict[Any, Callable[[Any], Any]] = {}


def encode(value: Any) -> bytes:
    """Return the bytes of a value. Raises OverflowError: an integer has more than 64 bits. Raises InvalidRequest: a
    text has half a surrogate pair.
    """
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a text can't be sent: {error}") from error


def decode(kind: Any, data: bytes | msgspec.Raw) -> Any:
    """Decode a value."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"no such message: {error}") from error


def decodes(kind: Any, make: Callable[[Any], Any]) -> None:
    """Register a constructor for values annotated with a class or protocol. `make` gets the encoded form, and raises
    ValueError if it is invalid.
    """
    _protocols[kind] = make


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=made)


def plain(value: Any) -> Any:
    """Convert a value of a type unknown to msgspec to a known one."""
    if isinstance(value, np.ndarray):
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of {value.dtype} can't be sent")
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):  # of a subclass
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Path):
        return str(value.absolute())  # the other process may run in another folder
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"a {type(value).__name__} can't be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


def made(kind: Any, value: Any) -> Any:
    """Create a value of a type unknown to msgspec; a ValueError gets the value's path."""
    if (get_origin(kind) or kind) is np.ndarray:
        return _array(kind, value)
    if kind in _protocols:
        return _protocols[kind](value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from error
    raise ValueError(f"a {type(value).__name__} is no {getattr(kind, '__name__', kind)}")


def _array(kind: Any, value: Any) -> NDArray[Any]:
    """Return an array that owns its memory."""
    try:
        name, shape, data = value
        dtype = _DTYPES[name]
        whole = all(type(size) is int and size >= 0 for size in shape) and len(shape) <= MOST_DIMENSIONS
    except (TypeError, ValueError, KeyError):
        raise ValueError("no array") from None
    if not whole or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("an array whose numbers do not fill its shape")
    wanted = _wanted(kind)
    if wanted is not None and dtype != wanted:
        raise ValueError(f"an array of {dtype}, and not of {wanted}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


@cache
def _wanted(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype of an annotation; None: any."""
    numbers = get_args(get_args(kind)[1])[0] if get_args(kind) else Any
    return None if numbers is Any else np.dtype(numbers)


class SentError(msgspec.Struct, array_like=True):
    """An error for another process.

    Attributes:
        fields: its attributes, as far as they can be encoded.
    """

    kind: str
    message: str
    fields: dict[str, str | int | float | bool | None] = {}

    @classmethod
    def of(cls, error: Exception) -> SentError:
        """Encode an error."""
        fields = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
        if isinstance(error, OSError):
            fields["errno"] = error.errno
        return cls(type(error).__name__, str(error).encode(errors="backslashreplace").decode(), fields)

    def error(self) -> Exception:
        """Return the error; a RuntimeError if its class is neither Palestra's nor Python's."""
        kind = _KNOWN.get(self.kind)
        if kind is None:
            return RuntimeError(f"{self.kind}: {self.message}")
        # The constructors of some classes make the message of other arguments, which a message does not have.
        error = kind.__new__(kind)
        error.args = (self.message,)
        if isinstance(error, OSError):
            error.errno = self.fields.get("errno")  # type: ignore[assignment]
        elif isinstance(error, PalestraError):
            vars(error).update(self.fields)
        return error
