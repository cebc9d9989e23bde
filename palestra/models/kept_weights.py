"""Weights that workers may read at any time, kept until newer ones take their place."""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.models.saved_weights import SavedWeights
from palestra.models.weight_file import FileWeights, weight_folder
from palestra.models.weights import LocalWeights, WeightSource

if TYPE_CHECKING:
    from torch import Tensor, dtype


def open_files() -> Path:
    """Return the folder with the files that this process has open; a process that was forked has one of its own."""
    return Path(f"/proc/{os.getpid()}/fd")


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
        self._matrices = matrices
        written = dict(_rounded(source, matrices))
        from palestra.models.tensor_file import write_weights  # loads torch, as all that has weights does

        write_weights(LocalWeights(list(written.items())), path)
        if folder is None and open_files().exists():
            opened = os.open(path, os.O_RDONLY)
            path.unlink()
            path = open_files() / str(opened)
            weakref.finalize(self, os.close, opened)
        else:
            weakref.finalize(self, path.unlink, missing_ok=True)
        self.source: WeightSource = FileWeights(path)
        self._places = _mapped(path, written)

    def replace(self, source: WeightSource) -> bool:
        """Write other weights in the place of these, if they are of the same names, shapes and precisions.

        The system has given the file its memory already, which takes longer than all else.

        Returns:
            False: they are not, and nothing is written.
        """
        given = dict(source.tensors())
        if given.keys() != self._places.keys() or not all(
            place.shape == given[name].shape and place.dtype == _precision(given[name], self._matrices)
            for name, place in self._places.items()
        ):
            return False
        for name, tensor in given.items():
            self._places[name].copy_(tensor.detach())
        return True


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HeldFile:
    """The weights of a file until nothing refers to this object; then the file may be written again.

    Attributes:
        source: what is read.
    """

    source: WeightSource


class WeightKeeper:
    """Keeps weights so that workers can read them at any time, and uses the memory of one that is not needed again."""

    def __init__(self, matrices: str, folder: Path | None = None) -> None:
        """Keep none yet.

        Args:
            matrices: name of the precision of torch; see `KeptFile`.
            folder: see `KeptFile`.
        """
        self._matrices, self._folder = matrices, folder
        self._spare: list[KeptFile] = []  # at most one

    def keep(self, source: WeightSource) -> HeldFile | KeptSource:
        """Keep weights; those of a folder stay there.

        Args:
            source: the weights; it may change once this has returned.

        Raises:
            OSError: there is no room, or the folder can't be written to.
        """
        import torch  # here, because a keeper is made on the event loop

        if isinstance(source, SavedWeights):
            return KeptSource(source)
        file = self._taken()
        if file is None or not file.replace(source):
            file = KeptFile(source, getattr(torch, self._matrices), self._folder)
        held = HeldFile(file.source)
        weakref.finalize(held, self._take_back, file)
        return held

    def _taken(self) -> KeptFile | None:
        """Return a file that is not needed again, which no other call gets; several threads may keep weights."""
        try:
            return self._spare.pop()
        except IndexError:
            return None

    def _take_back(self, file: KeptFile) -> None:
        """Keep a file for later weights, in the place of the one before.

        One that other machines read is never written over: a network's file system may show them what was there before.
        """
        if self._folder is None:
            self._spare[:] = [file]


def _mapped(path: Path, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, [n, d] or [d], of a file by name: what is written into them is in the file."""
    import torch

    whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")  # as safetensors has it: a length, then a header
    header = json.loads(whole[8:start].numpy().tobytes())
    found = {}
    for name, tensor in written.items():
        first, last = header[name]["data_offsets"]
        found[name] = whole[start + first : start + last].view(tensor.dtype).view(tensor.shape)
    return found


def _precision(tensor: Tensor, matrices: dtype) -> dtype:
    """Return the precision in which a weight, [n, d] or [d], is kept."""
    return matrices if tensor.ndim > 1 else tensor.dtype


def _rounded(source: WeightSource, matrices: dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, [n, d] or [d], in the precisions in which they are kept."""
    for name, tensor in source.tensors():
        yield name, tensor.detach().to("cpu", _precision(tensor, matrices))
