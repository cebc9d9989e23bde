"""Slots: how many adapters are in memory with their optimizers; the others wait on disk, and come back when needed."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from palestra.models.device import return_freed_memory
from palestra.trainer.torch_policy import TorchPolicy


class Slots:
    """The policies with adapters that are in memory, the least recently used first.

    For an evicted policy the trainer keeps its version, its requests and its tokenizer. Its weights, gradients and
    moments are in files with checksums, and return bit by bit. The files belong to the process: after its death a job
    continues from its checkpoint.
    """

    def __init__(self, count: int | None) -> None:
        """Begin with free slots.

        Args:
            count: how many policies are in memory at a time; None: all.
        """
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

        Raises:
            CheckpointError: the disk is full, or files of a policy are damaged.
        """
        for name, policy in policies.items():
            if self._count is None or policy.model.adapter is None:
                continue
            if name not in self._inside:
                self._make_room(policies.keys())
                if (folder := self._outside.get(name)) is not None:
                    policy.unpark(folder)
                    del self._outside[name]
                    shutil.rmtree(folder, ignore_errors=True)
                self._inside[name] = policy
            self._inside.move_to_end(name)

    def _make_room(self, wanted: Collection[str]) -> None:
        """Write the policies that were not used for longest to disk until there is a free slot."""
        assert self._count is not None
        for name in [name for name in self._inside if name not in wanted]:
            if len(self._inside) < self._count:
                return
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="palestra-adapters-"))
            folder = self._folder / str(self.evictions)
            self._inside[name].park(folder)
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
