"""Memory for the moments of an optimizer, outside of malloc's heap.

Moments are twice as large as the weights, are made behind the first gradient, and stay. In a heap that keeps freed
memory, as `tune_malloc` wants, they would lie scattered where activations were, and the next pass would have to find
room between them: in `make demo` that took another 200 MB.
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
    """Return zeros of the shapes and types of tensors, [n, d] or [d], in one mapping of memory, on Linux.

    All of them are parts of one storage, which is freed when the last of them is.

    Raises:
        MemoryError: there is no room.
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
