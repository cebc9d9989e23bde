"""Memory for the moments of an optimizer, outside of malloc's heap.

Moments are twice as large as the weights, are created after the first gradient, and stay. `tune_malloc` makes the heap
keep freed memory, where moments would fragment the space that activations reuse (+200 MB in `make demo`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LINE = 64  # bytes, between which tensors begin: what torch's own allocator promises


def zeros_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros with the shapes and types of tensors, [n, d] or [d], in one memory mapping, on Linux.

    They share one storage, which is freed with the last of them.
    """
    starts, end = list[int](), 0
    for tensor in tensors:
        starts.append(end)
        end += math.ceil(max(tensor.nbytes, 1) / _LINE) * _LINE
    try:
        memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {end / 2**30:.1f} GiB of moments") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]
