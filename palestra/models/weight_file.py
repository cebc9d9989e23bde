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


def write_weights(source: WeightSource, path: Path, dtype: torch.dtype | None = None) -> FileWeights:
    """Write weights into a file, and return what reads them there. A file of this name is replaced as a whole.

    Args:
        source: the weights; it may change once this has returned.
        path: of the file.
        dtype: precision of what is written; None: of each tensor as it is.

    Raises:
        OSError: the file can't be written; a part of it is not left behind.
    """
    from palestra.models.tensor_file import write_tensors  # here alone: it loads torch, which naming a file does not

    part = path.with_name(f"{path.name}.part")
    try:
        write_tensors(list(source.tensors()), part, dtype)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return FileWeights(path)


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights in a file that `write_weights` made.

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
