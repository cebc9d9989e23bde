"""The transfer of a policy's weights from a trainer to `Engine.sync_weights`.

Trainer and engine do not know each other. A source decides how tensors travel: directly within one process, or by a
file, which is in shared memory if the machine has it, or by a folder on the disk. This module does not import torch,
because the fake trainer and engine run without it.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightSource(ABC):
    """The weights of one version of a policy, for an engine to read.

    A source is valid until the trainer's next optimizer step: an engine copies what it needs before `sync_weights`
    returns.
    """

    __slots__ = ()

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight once, as (name, tensor), under the names of `CausalLM.own_parameters`.

        Matrices are [n, d], norms and biases [d].
        """


@dataclass(frozen=True, slots=True)
class LocalWeights(WeightSource):
    """Weights that are tensors of this process, without a copy."""

    named: Sequence[tuple[str, Tensor]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves, [n, d] or [d], which the trainer's next update changes; see `WeightSource`."""
        return iter(self.named)


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
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - an object of Rust, over which one can't iterate
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"weights can't be read from {self.path}: {error}") from error


@dataclass(frozen=True, slots=True)
class SavedWeights(WeightSource):
    """Weights in the files of a folder, in Hugging Face's layout, or PEFT's for an adapter."""

    folder: Path

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, [n, d] or [d], file by file; see `WeightSource`."""
        from safetensors.torch import load_file

        from palestra.models.adapter_files import adapter_folder, read_adapter

        if adapter_folder(str(self.folder)) is not None:
            yield from read_adapter(self.folder).weights.items()
        for path in sorted(self.folder.glob("model*.safetensors")):
            yield from load_file(path).items()
