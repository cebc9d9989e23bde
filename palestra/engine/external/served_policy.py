"""One policy of an engine that is a server: its version, who may send requests, and how its weights are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from palestra.engine.external.api import Counters, EngineApi
from palestra.engine.external.process import ServerProcess
from palestra.engine.external.reply import Bounds
from palestra.errors import ModelError
from palestra.models.weight_file import write_weights
from palestra.models.weights import LocalWeights, WeightSource
from palestra.types.calls import PolicyVersion


@dataclass(kw_only=True, eq=False)
class ServedPolicy:
    """A policy and the server that samples from it.

    Attributes:
        api: the server's routes.
        bounds: what its replies have to keep.
        shapes: of the weights that an update has to bring, by name.
        folder: for files of weights, which the server sees, too; it has no others in it.
        dtype: precision of the weights that are sent.
        process: the server's, if the job has started it.
        kv_bytes: its memory for keys and values; 0: unknown.
        most_calls: requests that are sent at the same time; more wait here.
        version: of the weights that the server has.
        sent: versions of the weights that were sent to the server, since the first update began.
        running: requests that were sent and are not over.
        counters: what the server has said of itself at last.
    """

    api: EngineApi
    bounds: Bounds
    shapes: dict[str, tuple[int, ...]]
    folder: Path
    dtype: torch.dtype
    process: ServerProcess | None
    kv_bytes: int
    most_calls: int
    version: PolicyVersion
    sent: list[PolicyVersion] = field(default_factory=list)
    running: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.most_calls)
        self._open = asyncio.Event()  # unset while the weights are replaced
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, may_run: asyncio.Event) -> AsyncIterator[None]:
        """Wait until a request may be sent, and count it while the block is open.

        Args:
            may_run: set unless the engine is paused.
        """
        async with self._room:
            while not (self._open.is_set() and may_run.is_set()):
                await may_run.wait()
                await self._open.wait()
            self.running += 1
            self._idle.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()

    def write(self, source: WeightSource, version: PolicyVersion) -> Path:
        """Write new weights into a file, and return its path.

        Raises:
            ModelError: they do not fit the server's model, or there is no room for the file.
        """
        named = list(source.tensors())
        for name, tensor in named:
            if self.shapes.get(name) != tuple(tensor.shape):
                raise ModelError(f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}")
        if missing := self.shapes.keys() - {name for name, _ in named}:
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        path = self.folder / f"{version}.safetensors"
        try:
            write_weights(LocalWeights(named), path, self.dtype)
            os.chmod(path, 0o600)
        except OSError as error:
            raise ModelError(f"new weights can't be written to {self.folder}: {error}") from error
        return path

    async def replace(self, path: Path, version: PolicyVersion, finish: bool, paused: bool) -> None:
        """Let the server read new weights while it is paused.

        Args:
            path: of the file.
            version: of the weights.
            finish: whether replies that are being sampled are finished first; others go on under the new weights.
            paused: whether the engine is paused already, and stays so.

        Raises:
            EngineFailure: the server has failed meanwhile; it can't be used any more.
        """
        async with self._updating:
            self._open.clear()
            try:
                if finish and not paused:
                    await self._idle.wait()
                self.sent.append(version)
                if not paused:
                    await self.api.pause()
                await self.api.load_weights(path, version)
                self.version = version
                if not paused:
                    await self.api.resume()
            finally:
                self._open.set()
