"""Arguments of compiled functions: tensors in C's layout, packed matrices, rows of a cache, layers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_BLOCKS, _INPUTS = (64, 32), 32  # outputs of a block, and inputs up to a multiple of which oneDNN fills a matrix


class MatrixAddress(ctypes.Structure):
    """Address of a packed matrix [outs, width] and its biases, see `cpu_kernels.c`."""

    _fields_ = (("packed", _POINTER), ("biases", _POINTER), ("width", _COUNT), ("outs", _COUNT), ("block", _COUNT))
    width: int
    outs: int
    kept: tuple[Tensor, Tensor | None]  # holds what lies there for as long as the address exists

    @classmethod
    def of(cls, packed: Tensor, plain: Tensor, bias: Tensor | None, trusted: bool) -> MatrixAddress | None:
        """Return the address of a matrix packed by oneDNN; None: its layout is not supported.

        `plain`, bfloat16 [outs, width], is compared with the packed numbers; `bias` is bfloat16 [outs], contiguous.
        `trusted`: the previous weights had the layout, so that comparing some blocks is enough.
        """
        (outs, width), given = plain.shape, plain.contiguous()
        block = next((size for size in _BLOCKS if _lies_in_blocks(packed, given, size, trusted)), None)
        if block is None:
            return None
        start = torch.ops.mkldnn.data_ptr(packed)
        made = cls(start, None if bias is None else bias.data_ptr(), width, outs, block)
        made.kept = packed, bias
        return made


class _CachedPart(ctypes.Structure):
    _fields_ = (
        ("storage", _POINTER),
        ("lengths", _POINTER),
        ("rows", _COUNT),
        ("places", _COUNT),
        ("capacity", _COUNT),
    )


class CachedRows:
    """The rows of a cache, each with one new token in a pass.

    Attributes:
        parts: storage [layers, 2, allocated rows, key heads, capacity, head dim], and the filled positions of its first
            rows, int64 [rows], less than the capacity.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the rows in the order of the parts, each with storage and lengths [rows]."""
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(lengths) for _, lengths in self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of rows, of key heads, and of numbers in a head."""
        return len(self), self.parts[0][0].shape[3], self.parts[0][0].shape[5]

    @property
    def layers(self) -> int:
        """Return the number of the cache's layers."""
        return self.parts[0][0].shape[0]

    @functools.cached_property
    def addresses(self) -> ctypes.Array[_CachedPart] | None:
        """Return the addresses of the parts; None: their layout is not supported."""
        for storage, lengths in self.parts:
            plain = all(one.is_contiguous() and one.device.type == "cpu" for one in (storage, lengths))
            typed = (storage.dtype, lengths.dtype) == (torch.bfloat16, torch.int64)
            alike = [storage.shape[at] for at in (0, 3, 5)] == [self.parts[0][0].shape[at] for at in (0, 3, 5)]
            if not (plain and typed and alike) or len(lengths) > storage.shape[2]:
                return None
        found = [
            _CachedPart(storage.data_ptr(), lengths.data_ptr(), len(lengths), storage.shape[2], storage.shape[4])
            for storage, lengths in self.parts
        ]
        return (_CachedPart * len(found))(*found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingLayer:
    """The properties of a Llama layer other than weights.

    Attributes:
        number: from 0.
        heads: of queries, and of keys.
        window: positions that a token attends to, including its own; None: all before it.
    """

    number: int
    heads: tuple[int, int]
    scale: float
    window: int | None


def _lies_in_blocks(packed: Tensor, plain: Tensor, size: int, some: bool) -> bool:
    """Return whether a matrix has the layout [blocks, pairs, size, 2] that C reads."""
    outs, width = plain.shape
    blocks, pairs = -(-outs // size), -(-width // _INPUTS) * _INPUTS // 2
    if width % 2 or not (outs and width) or torch.ops.mkldnn._nbytes(packed) != 4 * blocks * pairs * size:
        return False
    memory = (ctypes.c_char * (4 * blocks * pairs * size)).from_address(torch.ops.mkldnn.data_ptr(packed))
    there = torch.frombuffer(memory, dtype=torch.int32).view(blocks, pairs, size)
    given = plain.view(torch.int32)
    compared = {0, blocks // 2, blocks - 1} if some else range(blocks)
    return all(
        torch.equal(there[n, : width // 2, : min(size, outs - size * n)], given[size * n : size * (n + 1)].t())
        for n in compared
    )


def laid(one: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor in C's layout, copied unless it is contiguous."""
    if one.dtype != dtype or one.shape != shape or one.device.type != "cpu":
        raise ValueError(f"{dtype} {shape} on a CPU is needed, not {one.dtype} {tuple(one.shape)} on {one.device}")
    return one.contiguous()


def written(one: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor for C to write to; it is never copied."""
    if not one.is_contiguous():
        raise ValueError(f"a tensor {tuple(one.shape)} that is written to must be contiguous")
    return laid(one, dtype, *shape)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a new tensor with a type and device that do not follow torch's defaults, which other threads change."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def start(one: Tensor | None) -> int | None:
    """Return the address of a tensor; the caller must keep the tensor alive until C returns."""
    return None if one is None else one.data_ptr()


def beside(new: tuple[Tensor, Tensor, Tensor], heads: tuple[int, int]) -> tuple[Sequence[Tensor], int]:
    """Return queries, keys and values of new tokens in C's layout, and the stride between tokens; views from `rotate`
    are not copied. `new` are bfloat16 on a CPU: queries [1, H, N, D], keys and values [1, K, N, D].
    """
    (queries, keys), count, width, stride = heads, new[0].shape[2], new[0].shape[3], new[0].stride(2)
    for one, own in zip(new, (queries, keys, keys), strict=True):
        if one.dtype != torch.bfloat16 or one.shape != (1, own, count, width) or one.device.type != "cpu":
            wanted = f"bfloat16 {(1, own, count, width)} on a CPU"
            raise ValueError(f"{wanted} is needed, not {one.dtype} {tuple(one.shape)} on {one.device}")
    if all(one.stride()[1:] == (width, stride, 1) for one in new):
        return new, stride
    whole = torch.cat(new, dim=1)[0].transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(0)
    return torch.split(whole, [queries, keys, keys], dim=1), whole.stride(2)
