"""Weights of a policy that are on the disk, as an engine reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.models.weights import WeightSource

if TYPE_CHECKING:
    from torch import Tensor


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
