"""What the functions of `cpu_kernels.c` are given: matrices that oneDNN has packed, rows of a cache, layers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_BLOCK, _INPUTS = 64, 32  # up to a multiple of which oneDNN fills the outputs and inputs of a matrix


class MatrixAddress(ctypes.Structure):
    """Where a packed matrix [outs, width] lies, and its biases, see `cpu_kernels.c`."""

    _fields_ = (("packed", _POINTER), ("biases", _POINTER), ("width", _COUNT), ("outs", _COUNT))
    width: int
    outs: int

    @classmethod
    def of(cls, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> MatrixAddress | None:
        """Return the address of what oneDNN has packed; None: it does not lie as the functions read it.

        Args:
            packed: bfloat16, which the caller keeps, as long as the address is used.
            shape: (outs, width) of the matrix.
            bias: bfloat16 [outs], which the caller keeps.
        """
        if not _lies_in_blocks(*shape):
            return None
        start = torch.ops.mkldnn.data_ptr(packed)
        return cls(start, None if bias is None else bias.data_ptr(), shape[1], shape[0])


class _CachedPart(ctypes.Structure):
    _fields_ = (
        ("storage", _POINTER),
        ("lengths", _POINTER),
        ("rows", _COUNT),
        ("places", _COUNT),
        ("capacity", _COUNT),
    )


class CachedRows:
    """The rows of a cache, each of which gets one new token in a pass.

    Attributes:
        parts: storage [layers, 2, places, key heads, capacity, head dim], and how many positions of its first rows are
            filled, int64 [rows], less than the capacity.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the rows, in the order of the parts."""
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(lengths) for _, lengths in self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many rows there are, key heads in each, and numbers in a head."""
        return len(self), self.parts[0][0].shape[3], self.parts[0][0].shape[5]

    @functools.cached_property
    def addresses(self) -> ctypes.Array[_CachedPart] | None:
        """Where the parts lie; None: not as C reads them."""
        tensors = [one for part in self.parts for one in part]
        types = {(torch.bfloat16, torch.int64)}
        plain = all(one.is_contiguous() and one.device.type == "cpu" for one in tensors)
        if not plain or {(storage.dtype, lengths.dtype) for storage, lengths in self.parts} != types:
            return None
        found = [
            _CachedPart(storage.data_ptr(), lengths.data_ptr(), len(lengths), storage.shape[2], storage.shape[4])
            for storage, lengths in self.parts
        ]
        return (_CachedPart * len(found))(*found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingLayer:
    """What a layer of the Llama kind is, beside its weights.

    Attributes:
        number: of the layer, from 0.
        heads: of queries, and of keys.
        scale: factor of the scores.
        window: how many positions a token sees, its own included; None: all before it.
    """

    number: int
    heads: tuple[int, int]
    scale: float
    window: int | None


@functools.cache
def _lies_in_blocks(outs: int, width: int) -> bool:
    """Return whether oneDNN packs matrices of this shape as `cpu_kernels.c` reads them: tried with one."""
    if width % 2 or not (outs and width):
        return False
    filled = [-(-size // step) * step for size, step in ((outs, _BLOCK), (width, _INPUTS))]
    plain = torch.zeros(filled, dtype=torch.bfloat16)
    columns, rows = (torch.arange(size).mul_(step).to(torch.uint8) for size, step in ((width, 37), (outs, 11)))
    plain[:outs, :width] = rows.unsqueeze(1) + columns  # up to 255, which bfloat16 has exactly
    packed = torch.ops.mkldnn._reorder_linear_weight(plain[:outs, :width].contiguous(), _BLOCK)
    if torch.ops.mkldnn._nbytes(packed) != plain.nbytes:
        return False
    lying = (ctypes.c_char * plain.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    wanted = plain.view(filled[0] // _BLOCK, _BLOCK, filled[1] // 2, 2).transpose(1, 2).contiguous()
    return torch.equal(torch.frombuffer(lying, dtype=torch.int16), wanted.view(torch.int16).flatten())
