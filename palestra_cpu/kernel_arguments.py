"""What compiled functions are given: tensors as C reads them, packed matrices, rows of a cache, layers."""

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
    """Where a packed matrix [outs, width] lies, and its biases, see `cpu_kernels.c`."""

    _fields_ = (("packed", _POINTER), ("biases", _POINTER), ("width", _COUNT), ("outs", _COUNT), ("block", _COUNT))
    width: int
    outs: int
    kept: tuple[Tensor, Tensor | None]  # holds what lies there for as long as the address exists

    @classmethod
    def of(cls, packed: Tensor, plain: Tensor, bias: Tensor | None, trusted: bool) -> MatrixAddress | None:
        """Return the address of what oneDNN has packed; None: it does not lie as the functions read it.

        Args:
            packed: of `plain`.
            plain: bfloat16 [outs, width], with which what lies there is compared.
            bias: bfloat16 [outs], contiguous.
            trusted: whether the weights before these lay in blocks, so that comparing some blocks is enough.
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
    """The rows of a cache, each of which gets one new token in a pass.

    Attributes:
        parts: storage [layers, 2, places, key heads, capacity, head dim], and how many positions of its first rows are
            filled, int64 [rows], less than the capacity.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the rows in the order of the parts, each of which has storage and lengths [rows]."""
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(lengths) for _, lengths in self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many rows there are, key heads in each, and numbers in a head."""
        return len(self), self.parts[0][0].shape[3], self.parts[0][0].shape[5]

    @property
    def layers(self) -> int:
        """How many layers the cache is of."""
        return self.parts[0][0].shape[0]

    @functools.cached_property
    def addresses(self) -> ctypes.Array[_CachedPart] | None:
        """Where the parts lie; None: not as C reads them."""
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


def _lies_in_blocks(packed: Tensor, plain: Tensor, size: int, some: bool) -> bool:
    """Return whether a matrix lies as [blocks, pairs, size, 2], in which C finds the outputs, and inputs in pairs."""
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
    """Return a tensor as C reads it, a copy if its numbers do not lie one after another.

    Raises:
        ValueError: it has another type or shape, or lies elsewhere.
    """
    if one.dtype != dtype or one.shape != shape or one.device.type != "cpu":
        raise ValueError(f"{dtype} {shape} on a CPU is needed, not {one.dtype} {tuple(one.shape)} on {one.device}")
    return one.contiguous()


def written(one: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor that C writes to, which therefore must lie there already; a copy would take what is written.

    Raises:
        ValueError: see `laid`; or its numbers do not lie one after another.
    """
    if not one.is_contiguous():
        raise ValueError(f"a tensor {tuple(one.shape)} that is written to must be contiguous")
    return laid(one, dtype, *shape)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a new tensor whose type and device do not follow torch's defaults, which other threads change."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def start(one: Tensor | None) -> int | None:
    """Return the address of a tensor; the caller has to hold the tensor until C returns."""
    return None if one is None else one.data_ptr()


def beside(new: tuple[Tensor, Tensor, Tensor], heads: tuple[int, int]) -> tuple[Sequence[Tensor], int]:
    """Return queries, keys and values of new tokens as C reads them, and how many numbers a token lies from the next.

    Of what `rotate` returns, nothing is copied.

    Args:
        new: bfloat16, queries [1, H, N, D], keys and values [1, K, N, D], on a CPU.

    Raises:
        ValueError: one has another type or shape, or lies elsewhere.
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
