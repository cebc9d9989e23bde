"""The weights of a policy in a file, for engines in processes of their own on the same machine.

The file is in the format of safetensors, in a folder of shared memory where the machine has one, so that it is written
and read at the speed of memory.
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
    """Return the folder for weight files: shared memory, or temporary files where the machine has none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class FileWeights(WeightSource):
    """Weights in a file that `write_weights` made (`palestra.models.tensor_file`).

    Attributes:
        path: of the file.
    """

    path: Path

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, [n, d] or [d], each mapped from the file. See `WeightSource`.

        Raises:
            ModelError: there is no such file, or it is damaged.
        """
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights can't be read from {self.path}: {error}") from error
