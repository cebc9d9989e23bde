"""Weights that workers may read at any time, until newer ones replace them."""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.models.weights import FileWeights, LocalWeights, SavedWeights, WeightSource, weight_folder

if TYPE_CHECKING:
    from torch import Tensor, dtype


def open_files() -> Path:
    """Return the folder that lists this process's open files; it differs after a fork."""
    return Path(f"/proc/{os.getpid()}/fd")


@dataclass(frozen=True, slots=True)
class KeptSource:
    """Weights in files that another component owns, such as a folder of past versions."""

    source: WeightSource


class KeptFile:
    """Weights in an unlinked file, freed with this object or when the process ends, however it ends.

    Other processes of the same user read it through `/proc`. Without `/proc`, or if other machines read it, the file
    keeps its name until this object is freed, and a killed process leaves it behind.
    """

    def __init__(self, source: WeightSource, matrices: dtype, folder: Path | None = None) -> None:
        """Write the weights.

        The source may change once this has returned. `matrices` is the precision of tensors with two dimensions or
        more, as engines have them; others keep theirs, because a model keeps its norms in the precision of its files.
        `folder` is shared with other machines; None: only processes of this machine read the weights.
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
        """Overwrite with weights of the same names, shapes and precisions; False: they differ, and nothing is written.

        Reusing the file's memory saves the time to allocate it, which is longer than writing.
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
    """A file's weights, which must not be overwritten while this object is referenced."""

    source: WeightSource


class WeightKeeper:
    """Keeps weights readable by workers, and reuses the memory of replaced ones."""

    def __init__(self, matrices: str, folder: Path | None = None) -> None:
        """Begin without weights; see `KeptFile` for the arguments."""
        self._matrices, self._folder = matrices, folder
        self._spare: list[KeptFile] = []  # at most one

    def keep(self, source: WeightSource) -> HeldFile | KeptSource:
        """Keep weights; weights in a folder stay there. The source may change once this has returned."""
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
        """Take a file that is free for reuse; thread-safe."""
        try:
            return self._spare.pop()
        except IndexError:
            return None

    def _take_back(self, file: KeptFile) -> None:
        """Keep a file for later weights, instead of the previous one.

        A file that other machines read is never overwritten: a network file system may show them its old content.
        """
        if self._folder is None:
            self._spare[:] = [file]


def _mapped(path: Path, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, [n, d] or [d], of a file by name, mapped: writing to them changes the file."""
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
    """Return the precision in which a weight, [n, d] or [d], is stored."""
    return matrices if tensor.ndim > 1 else tensor.dtype


def _rounded(source: WeightSource, matrices: dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, [n, d] or [d], in their stored precisions."""
    for name, tensor in source.tensors():
        yield name, tensor.detach().to("cpu", _precision(tensor, matrices))
