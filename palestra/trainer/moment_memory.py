"""Memory for the moments of an optimizer, outside of malloc's heap.

Moments are twice as large as the weights, are made behind the first gradient, and stay. In a heap that keeps freed
memory, as `tune_malloc` wants, they would lie scattered where activations were, and the next pass would have to find
room between them: in `make demo` that took another 200 MB.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LINE = 64  # bytes, between which tensors begin: what torch's own allocator promises


def zeros_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the shapes and types of tensors, [n, d] or [d], in one mapping of memory, on the CPU.

    The memory is freed when the last of them is; pages that nobody has written take none.
    """
    starts, end = list[int](), 0
    for tensor in tensors:
        starts.append(end)
        end += math.ceil(max(tensor.nbytes, 1) / _LINE) * _LINE
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]
