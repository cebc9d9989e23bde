"""The weights of ranks on one machine in one file for engines, into which each rank writes its own rows.

Nothing is gathered: no rank needs memory for more than it has, and all of them write at the same time.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from palestra.trainer.optimizer import Named
from palestra.trainer.sharded.mapped import mapped, reserve, rows_of_rank
from palestra.trainer.sharded.parts import local_part

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors has them


class WeightFile:
    """The layout of a file of safetensors with all weights of a policy, the same on every rank."""

    def __init__(self, parameters: Named, dtype: torch.dtype) -> None:
        """Lay out the weights.

        Args:
            parameters: parts of this rank, each weight once with its name.
            dtype: of weights with two dimensions or more; others are float32.
        """
        typed = [(name, p, dtype if p.ndim >= 2 else torch.float32) for name, p in parameters]
        typed.sort(key=lambda one: -one[2].itemsize)  # so that each begins at a multiple of the size of its numbers
        entries, self._places, end = dict[str, object](), list[tuple[Tensor, torch.dtype, int]](), 0
        for name, parameter, own in typed:
            start, end = end, end + parameter.numel() * own.itemsize
            entries[name] = {"dtype": _NAMES[own], "shape": list(parameter.shape), "data_offsets": [start, end]}
            self._places.append((parameter, own, start))
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        self._header = struct.pack("<Q", len(header)) + header
        self._size = len(self._header) + end

    def begin(self, path: Path) -> None:
        """Make the file, without weights; one rank does so.

        Raises:
            OSError: there is no room for it.
        """
        try:
            reserve(path, self._size, self._header)
        except OSError as error:
            raise OSError(f"weights can't be written to {path}: {error}") from error

    def fill(self, path: Path) -> None:
        """Write the rows of this rank, rounded, into a file that `begin` has made."""
        rank, count = dist.get_rank(), dist.get_world_size()
        whole = mapped(path, self._size)
        for parameter, dtype, start in self._places:
            rows = rows_of_rank(parameter.shape[0], rank, count)
            width = dtype.itemsize * math.prod(parameter.shape[1:])
            first = len(self._header) + start + rows.start * width
            part = whole[first : first + (rows.stop - rows.start) * width].view(dtype)
            part.copy_(local_part(parameter.detach()).flatten())
