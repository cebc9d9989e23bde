"""An optimizer's moments on disk, written by each rank of a sharded trainer for its own part.

The format is that of `torch.distributed.checkpoint`: any number of ranks can read their parts, and one process can read
all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from palestra.errors import CheckpointError

KINDS = ("exp_avg", "exp_avg_sq", "step")


def write_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Write the parts of this rank. Collective: every rank passes tensors of the same names. `moments` are DTensors [n,
    d] or [d] by kind and name, or scalars that are equal on all ranks.
    """
    try:
        save(dict(moments), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise OSError(_first(error)) from error


def read_moments(folder: Path, parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return the moments of weights by kind and name, [n, d] or [d], sharded like the weight; weights without moments
    are left out.
    """
    reader = FileSystemReader(folder)
    try:
        known = reader.read_metadata().state_dict_metadata
        wanted = {
            f"{kind}.{name}": torch.zeros(()) if kind == "step" else torch.zeros_like(parameter, requires_grad=False)
            for name, parameter in parameters
            for kind in KINDS
            if f"{kind}.{name}" in known
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be in one process
            load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"{folder} can't be read: {_first(error)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}") from error
    return wanted


def _first(error: CheckpointException) -> str:
    """Return the error of the first rank that failed."""
    failures = error.failures
    rank = min(failures)
    return f"rank {rank}: {failures[rank][0]}"
