"""Slots: how many adapters are in memory with their optimizers; the others wait on disk, and come back when needed."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from palestra.errors import CheckpointError
from palestra.models.device import return_freed_memory
from palestra.trainer import checkpoint
from palestra.trainer.optimizer import Optimizer, read_named, write_named
from palestra.trainer.torch_policy import TorchPolicy

_WEIGHT, _GRADIENT = "weight", "gradient"


class Slots:
    """The policies with adapters that are in memory, the least recently used first.

    For an evicted policy the trainer keeps its version, its requests and its tokenizer. Its weights, gradients and
    moments are in files with checksums, and return bit by bit. The files belong to the process: after its death a job
    continues from its checkpoint.
    """

    def __init__(self, count: int | None) -> None:
        """Begin with free slots. `count`: how many policies are in memory at a time; None: all."""
        self._count = count
        self._inside: OrderedDict[str, TorchPolicy] = OrderedDict()
        self._outside: dict[str, Path] = {}
        self._folder: Path | None = None
        self.evictions = 0

    @property
    def count(self) -> int | None:
        """Return how many policies are in memory at a time; None: all."""
        return self._count

    def use(self, policies: dict[str, TorchPolicy]) -> None:
        """Load policies into memory, evicting the least recently used.

        Policies without adapters are always in memory. There may be at most as many policies as slots.
        """
        for name, policy in policies.items():
            if self._count is None or policy.model.adapter is None:
                continue
            if name not in self._inside:
                self._free_capacity(policies.keys())
                if (folder := self._outside.get(name)) is not None:
                    _unpark(policy, folder)
                    del self._outside[name]
                    shutil.rmtree(folder, ignore_errors=True)
                self._inside[name] = policy
            self._inside.move_to_end(name)

    def _free_capacity(self, wanted: Collection[str]) -> None:
        assert self._count is not None
        for name in [name for name in self._inside if name not in wanted]:
            if len(self._inside) < self._count:
                return
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="palestra-adapters-"))
            folder = self._folder / str(self.evictions)
            _park(self._inside[name], folder)
            self._outside[name] = folder
            del self._inside[name]
            self.evictions += 1
            return_freed_memory()

    def forget(self, name: str) -> None:
        """Free a removed policy's slot, or delete its files."""
        self._inside.pop(name, None)
        if (folder := self._outside.pop(name, None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _park(policy: TorchPolicy, folder: Path) -> None:
    """Write all that training has made into a folder, whole or not at all, and free its memory."""

    def fill(path: Path) -> None:
        for name, optimizer in policy.optimizers():
            park(optimizer, path, name)

    checkpoint.write_weights_folder(folder, 0, fill, {})
    for _, optimizer in policy.optimizers():
        let_go(optimizer)


def _unpark(policy: TorchPolicy, folder: Path) -> None:
    if checkpoint.read_weights(folder) is None:
        raise CheckpointError(f"{folder}, where an adapter was put while others were trained, is gone or damaged")
    for name, optimizer in policy.optimizers():
        unpark(optimizer, folder, name)


def park(optimizer: Optimizer, folder: Path, prefix: str) -> None:
    """Write weights, gradient and moments into files of an existing folder; `let_go` may then drop them."""
    tensors = [(f"{_WEIGHT}.{name}", p.detach()) for name, p in optimizer.parameters]
    tensors += [(f"{_GRADIENT}.{name}", p.grad) for name, p in optimizer.parameters if p.grad is not None]
    write_named(folder, f"{prefix}-{_WEIGHT}", tensors)
    optimizer.write(folder, f"{prefix}-moments")


def let_go(optimizer: Optimizer) -> None:
    """Drop weights, gradient and moments, which `park` has written; `unpark` has to come before all else."""
    for _, parameter in optimizer.parameters:
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
    optimizer.forget_moments()


def unpark(optimizer: Optimizer, folder: Path, prefix: str) -> None:
    """Restore what `park` wrote, bit by bit."""
    found = read_named(folder, f"{prefix}-{_WEIGHT}")
    for name, parameter in optimizer.parameters:
        # Copies: what is read lies at any address, and products of numbers that are not aligned round differently.
        parameter.data = found[f"{_WEIGHT}.{name}"].to(parameter.device, copy=True)
        gradient = found.get(f"{_GRADIENT}.{name}")
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    optimizer.read(folder, f"{prefix}-moments")
