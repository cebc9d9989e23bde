"""Writes safetensors files piece by piece.

The library of that format copies everything it writes, which takes as much memory as the file, and as long as writing
it.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.models.weights import FileWeights, WeightSource

_PIECE = 2**20  # numbers that are rounded and written at a time
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Shaped = tuple[str, Sequence[int], torch.dtype]  # name, shape and type of a tensor


def write_weights(source: WeightSource, path: Path, dtype: torch.dtype | None = None) -> FileWeights:
    """Write weights into a file, atomically, and return their reader. The source may change once this has returned;
    without `dtype` each tensor keeps its own.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        write_tensors(list(source.tensors()), part, dtype)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return FileWeights(path)


def write_tensors(named: Sequence[tuple[str, Tensor]], path: Path, dtype: torch.dtype | None = None) -> None:
    """Write tensors of any shape and device into a file. Without `dtype` each tensor keeps its own."""
    typed = in_aligned_order([(tensor.detach(), (name, tensor.shape, dtype or tensor.dtype)) for name, tensor in named])
    header, _ = lay_out([shaped for _, shaped in typed])
    with path.open("wb") as file:
        file.write(header)
        for tensor, (_, _, kind) in typed:
            for piece in torch.split(tensor.reshape(-1), _PIECE):
                file.write(piece.to("cpu", kind).view(torch.uint8).numpy().data)


def in_aligned_order(typed: list[tuple[Tensor, Shaped]]) -> list[tuple[Tensor, Shaped]]:
    """Return tensors of any shape in an order in which each is aligned to its element size."""
    return sorted(typed, key=lambda one: -one[1][2].itemsize)


def lay_out(shaped: Sequence[Shaped]) -> tuple[bytes, list[int]]:
    """Return the header of a file of tensors, and the offset of each tensor and of the file's end.

    The header is the length of a description, and the description, padded to a multiple of 8 bytes.
    """
    entries: dict[str, Any] = {}
    ends = [0]
    for name, shape, kind in shaped:
        size = kind.itemsize * math.prod(shape)
        entries[name] = {"dtype": _KINDS[kind], "shape": list(shape), "data_offsets": [ends[-1], ends[-1] + size]}
        ends.append(ends[-1] + size)
    description = json.dumps(entries).encode()
    description += b" " * (-len(description) % 8)
    header = len(description).to_bytes(8, "little") + description
    return header, [len(header) + end for end in ends]
