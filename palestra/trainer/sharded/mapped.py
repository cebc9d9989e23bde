"""Files whose bytes are memory that several ranks of one machine have at the same time."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor


def reserve_file(path: Path, size: int, head: bytes = b"") -> None:
    """Make a file of `size` bytes for which there is room: without it, a write to the memory would be a SIGBUS.

    Args:
        path: of the file; an older one is replaced.
        size: in bytes.
        head: the first bytes.

    Raises:
        OSError: there is no room.
    """
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)


def mapped(path: Path, size: int) -> Tensor:
    """Return the bytes of a file, uint8 [size], as memory: what one process writes, the others have."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def rows_of_rank(rows: int, rank: int, count: int) -> slice:
    """Return which rows of a matrix, or numbers of a vector, a rank has, as FSDP shares them out."""
    size = math.ceil(rows / count)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))
