"""A policy's weights in a file, for engines in other processes on the same machine.

It is a safetensors file in shared memory, if the machine has it, so that it is written and read at the speed of memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
from safetensors import SafetensorError

from palestra.errors import ModelError
from palestra.models.weights import WeightSource

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")


def weight_folder() -> Path:
    """Return the folder for weight files: shared memory, or temporary files."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class FileWeights(WeightSource):
    """Weights in a file written by `write_weights` (`palestra.models.tensor_file`)."""

    path: Path

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, [n, d] or [d], mapped from the file; see `WeightSource`."""
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights can't be read from {self.path}: {error}") from error
