"""Weights that workers may read at any time, kept until newer ones take their place."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.models.saved_weights import SavedWeights
from palestra.models.weight_file import FileWeights, weight_folder, write_weights
from palestra.models.weights import LocalWeights, WeightSource

if TYPE_CHECKING:
    from torch import Tensor, dtype

OPEN_FILES = Path(f"/proc/{os.getpid()}/fd")


@dataclass(frozen=True, slots=True)
class KeptSource:
    """Weights whose files others look after, such as a folder of past versions.

    Attributes:
        source: what is read.
    """

    source: WeightSource


class KeptFile:
    """Weights in a file without a name, which is freed with this object, or with this process, however that ends.

    Other processes of the same user read it through `/proc`. Where a system has no `/proc`, or other machines read it,
    the file keeps its name until this object is gone, and a process that is killed leaves it behind.
    """

    def __init__(self, source: WeightSource, matrices: dtype, folder: Path | None = None) -> None:
        """Write the weights.

        Args:
            source: the weights; it may change once this has returned.
            matrices: precision of tensors with two dimensions or more, as the engines have them. Others stay as they
                are, because a model keeps its norms in the precision of its files.
            folder: that other machines see, too; None: only processes of this machine read the weights.

        Raises:
            OSError: there is no room, or the folder can't be written to.
        """
        path = (folder or weight_folder()) / f"palestra-{os.getpid()}-{secrets.token_hex(8)}.safetensors"
        write_weights(LocalWeights(list(_rounded(source, matrices))), path)
        if folder is None and OPEN_FILES.exists():
            opened = os.open(path, os.O_RDONLY)
            path.unlink()
            self.source: WeightSource = FileWeights(OPEN_FILES / str(opened))
            weakref.finalize(self, os.close, opened)
        else:
            self.source = FileWeights(path)
            weakref.finalize(self, path.unlink, missing_ok=True)


def keep_weights(source: WeightSource, matrices: dtype, folder: Path | None = None) -> KeptFile | KeptSource:
    """Keep weights so that a worker can read them at any time. Those of a folder stay there.

    Args:
        source: the weights.
        matrices: see `KeptFile`.
        folder: see `KeptFile`.

    Raises:
        OSError: there is no room, or the folder can't be written to.
    """
    return KeptSource(source) if isinstance(source, SavedWeights) else KeptFile(source, matrices, folder)


def _rounded(source: WeightSource, matrices: dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in source.tensors():
        yield name, tensor.detach().to("cpu", matrices) if tensor.ndim > 1 else tensor
