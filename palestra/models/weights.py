"""The transfer of a policy's weights from a trainer to `Engine.sync_weights`.

Trainer and engine do not know each other. A source decides how tensors travel: directly within one process, or by a
file, which is in shared memory if the machine has it, or by a folder on the disk. This module does not import torch,
because the fake trainer and engine run without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
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


class OwnedFolder:
    """A new folder, private to this user, that is removed after the process that made it, however that process ends.

    The kernel does not free shared memory of killed processes. So the owner locks its folder, and the next process to
    make one removes folders without a lock.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Remove folders of this prefix whose owners have ended, and create a new one. Without `parent` it is in shared
        memory.
        """
        parent = parent or weight_folder()
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # A folder has no lock for a moment, in which another process may remove it.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._lock = _locked(self.path)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder with its content; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """Return an open folder that this process has locked; programs that it starts do not inherit the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_left(folder: Path) -> None:
    """Remove a folder that no process has locked; one of another user stays."""
    with contextlib.suppress(OSError):
        descriptor = _locked(folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
