"""The key/value pairs at the beginning of a GGUF file, which may be cut off after them."""

from __future__ import annotations

import struct
from typing import IO, Any

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def read_head(file: IO[bytes]) -> dict[str, Any]:
    """All pairs, in order."""
    if file.read(4) != b"GGUF":
        raise ValueError("not a GGUF file")
    _version, _tensors, pairs = _unpack(file, "<I"), _unpack(file, "<Q"), _unpack(file, "<Q")
    return {_string(file): _value(file, _unpack(file, "<I")) for _ in range(pairs)}


def _unpack(file: IO[bytes], kind: str) -> Any:
    return struct.unpack(kind, file.read(struct.calcsize(kind)))[0]


def _string(file: IO[bytes]) -> str:
    return file.read(_unpack(file, "<Q")).decode()


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        of = _unpack(file, "<I")
        return [_value(file, of) for _ in range(_unpack(file, "<Q"))]
    return _unpack(file, _NUMBERS[kind])
