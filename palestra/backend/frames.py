"""Messages between a job and a base server: a header in JSON, and the bytes of its arrays.

A message is the length of its header (four bytes, little-endian), the header, and the arrays one after another, each as
little-endian numbers. Python's own `json` writes the header, because a number may be NaN.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from palestra.errors import InvalidRequest
from palestra.http.bodies import check_size
from palestra.process.codec import MOST_DIMENSIONS, plain

PROTOCOL = 1  # grows with every change of the messages
MOST_BYTES = 256 * 2**20  # of a message
# Of a header. Each row of a batch has some 500 bytes, 25 objects and lists, and 25 keys.
MOST_HEADER, MOST_CONTAINERS, MOST_KEYS, MOST_VALUES = 32 * 2**20, 500_000, 600_000, 4_000_000
TAKEN_OVER = 4001  # the code with which a connection is closed when another process of the job has connected
REFUSED = 4002  # and when its message could not be used, after an answer with the reason
_LENGTH = struct.Struct("<I")
_KINDS = {"i4": np.int32, "f4": np.float32, "b1": np.bool_, "u1": np.uint8}
_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """A message as it was read.

    Attributes:
        header: JSON; `{"array": n}` stands for the array n.
        arrays: in order.
    """

    header: dict[str, Any]
    arrays: tuple[NDArray[Any], ...]


def write_frame(header: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message.

    Args:
        header: may hold records, arrays of int32, float32, bool or uint8, paths, and collections of these.

    Raises:
        TypeError: a value can't be sent.
    """
    arrays: list[NDArray[Any]] = []

    def sent(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return plain(value)
        if value.dtype not in _NAMES:
            raise TypeError(f"an array of {value.dtype} can't be sent")
        arrays.append(value)
        return {"array": len(arrays) - 1}

    tree: dict[str, Any] = msgspec.to_builtins(header, str_keys=True, enc_hook=sent)
    tree["arrays"] = [[_NAMES[array.dtype], *array.shape] for array in arrays]
    text = json.dumps(tree, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)))


def check_header(data: bytes) -> None:
    """Refuse a message whose header would take long to parse, or much memory, before it is parsed.

    Raises:
        InvalidRequest: the header is too long, or has too many values, or there is none.
    """
    if (length := _header_length(data)) > MOST_HEADER:
        raise InvalidRequest(f"the header of a message has at most {MOST_HEADER:,} bytes, and this one has {length:,}")
    check_size(data[_LENGTH.size : _LENGTH.size + length], MOST_CONTAINERS, MOST_KEYS, MOST_VALUES)


def read_frame(data: bytes) -> Frame:
    """Return the message that `write_frame` has made bytes of.

    Raises:
        InvalidRequest: the bytes are no message, or the header is too long.
    """
    check_header(data)
    start = _LENGTH.size + _header_length(data)
    try:
        header = json.loads(data[_LENGTH.size : start])
        arrays = []
        for kind, *shape in header.pop("arrays"):
            if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size <= len(data) for size in shape):
                raise ValueError("shape")
            count = math.prod(shape)
            # A copy, because the bytes of a message are read-only, and its numbers may lie between two words.
            array = np.frombuffer(data, dtype=np.dtype(_KINDS[kind]).newbyteorder("<"), count=count, offset=start)
            arrays.append(array.astype(_KINDS[kind]).reshape(shape))
            start += array.nbytes
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"no message of this protocol: {type(error).__name__}") from error
    if start != len(data):
        raise InvalidRequest("no message of this protocol: its arrays are shorter or longer than its bytes")
    return Frame(header, tuple(arrays))


def _header_length(data: bytes) -> int:
    length = int.from_bytes(data[: _LENGTH.size], "little")
    if len(data) < _LENGTH.size + length:
        raise InvalidRequest("no message of this protocol: it is shorter than its header")
    return length
