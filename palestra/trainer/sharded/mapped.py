"""Files mapped as memory that the ranks of one machine share."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor


def reserve_file(path: Path, size: int, head: bytes = b"") -> None:
    """Create a file whose `size` bytes are allocated on disk: a write to a mapped page without backing is a SIGBUS.

    Args:
        head: the first bytes.
    """
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)


def mapped(path: Path, size: int) -> Tensor:
    """Map a file as uint8 [size]; processes that map it share the memory."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def rows_of_rank(rows: int, rank: int, count: int) -> slice:
    """Return the rows of a matrix, or numbers of a vector, that FSDP assigns to a rank."""
    size = math.ceil(rows / count)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))
