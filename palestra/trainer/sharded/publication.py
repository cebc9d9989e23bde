"""Publishes the weights of ranks on one machine in one file for engines; each rank writes its own rows.

Weights are not gathered: no rank needs more memory than it has, and all write at the same time.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist

from palestra.models.tensor_file import in_aligned_order, lay_out
from palestra.trainer.optimizer import Named
from palestra.trainer.sharded.mapped import mapped, reserve_file, rows_of_rank
from palestra.trainer.sharded.parts import local_part


class WeightFile:
    """Layout of a safetensors file with all weights of a policy, the same on every rank."""

    def __init__(self, parameters: Named, dtype: torch.dtype) -> None:
        """Lay out the weights.

        Args:
            dtype: of weights with two dimensions or more; others are float32.
        """
        types = [dtype if p.ndim >= 2 else torch.float32 for _, p in parameters]
        typed = in_aligned_order([(p, (name, p.shape, own)) for (name, p), own in zip(parameters, types, strict=True)])
        self._header, (*starts, self._size) = lay_out([shaped for _, shaped in typed])
        self._places = [(p, own, start) for (p, (_, _, own)), start in zip(typed, starts, strict=True)]

    def begin(self, path: Path) -> None:
        """Create the file without weights, on one rank."""
        try:
            reserve_file(path, self._size, self._header)
        except OSError as error:
            raise OSError(f"weights can't be written to {path}: {error}") from error

    def fill(self, path: Path) -> None:
        """Write this rank's rows, rounded, into a file that `begin` created."""
        rank, count = dist.get_rank(), dist.get_world_size()
        whole = mapped(path, self._size)
        for parameter, dtype, start in self._places:
            rows = rows_of_rank(parameter.shape[0], rank, count)
            width = dtype.itemsize * math.prod(parameter.shape[1:])
            first = start + rows.start * width
            part = whole[first : first + (rows.stop - rows.start) * width].view(dtype)
            part.copy_(local_part(parameter.detach()).flatten())
