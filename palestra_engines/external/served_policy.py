"""One policy of an engine that is a server: its version, who may send requests, and how its weights are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from palestra.errors import ConfigError, EngineKeyRefused, ModelError
from palestra.models.tensor_file import write_weights
from palestra.models.weight_file import FileWeights
from palestra.models.weights import LocalWeights, WeightSource
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion
from palestra_engines.external.api import Counters, EngineApi
from palestra_engines.external.process import ServerProcess
from palestra_engines.external.reply import ReplyBounds


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """The weights that a request may now be sampled from.

    Attributes:
        version: at the beginning of the reply.
        adapter: name of the adapter at the server; None: the server's own weights.
        log: versions of all weights sent to the server, growing while the request runs.
        before: number of versions sent before the request.
    """

    version: PolicyVersion
    adapter: str | None
    log: Sequence[PolicyVersion]
    before: int

    @property
    def sent(self) -> Sequence[PolicyVersion]:
        """Return the versions sent to the server since the request."""
        return self.log[self.before :]


class NewWeights(Protocol):
    """New weights prepared for a server by `ExternalPolicy.prepare`."""

    def discard(self) -> None:
        """Free what was created only for this update."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """New weights on disk, or in shared memory.

    Attributes:
        path: of the file, or of an adapter's folder.
        is_own: whether the file was written for this update, and is removed after it.
    """

    path: Path
    is_own: bool

    def discard(self) -> None:
        """Remove the file, if it was written for this update."""
        if self.is_own:
            self.path.unlink(missing_ok=True)


@dataclass(kw_only=True, eq=False)
class ExternalPolicy:
    """A policy whose whole weights are in a server that samples from it.

    Attributes:
        bounds: limits of its replies.
        shapes: of the weights that an update must contain, by name.
        folder: for weight files, shared with the server; otherwise empty.
        process: the server's, if the job has started it.
        kv_bytes: its key-value memory; 0: unknown.
        most_calls: limit of concurrent requests; more wait here.
        sent: versions sent to the server, since the first update began.
        sampled_tokens: of all replies so far.
        replacing: whether the server is paused for new weights.
        moved_bytes: broadcast to the server so far.
    """

    name: str
    api: EngineApi
    bounds: ReplyBounds
    shapes: dict[str, tuple[int, ...]]
    folder: Path
    dtype: torch.dtype
    process: ServerProcess | None
    kv_bytes: int
    most_calls: int
    version: PolicyVersion
    sent: list[PolicyVersion] = field(default_factory=list)
    running: int = 0
    sampled_tokens: int = 0
    replacing: bool = False
    counters: Counters = field(default_factory=Counters)
    moved_bytes: int = 0

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.most_calls)
        self._open = asyncio.Event()  # unset while the weights are replaced
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    async def begin(self) -> None:
        """Check whether the server fits the policy, and prepare it, before any other request."""
        try:
            await self.api.check(self.dtype)
            await self.api.set_version(self.version)
        except EngineKeyRefused as error:  # asking again would not help
            raise ConfigError(str(error)) from error

    def version_of(self, name: str) -> PolicyVersion:
        """Return the version that a new request of a policy is sampled from."""
        return self.version

    @contextlib.asynccontextmanager
    async def turn(self, may_run: asyncio.Event, name: str) -> AsyncIterator[PolicyTurn]:
        """Wait until a request may be sent, and count it while the block is open."""
        async with self._room:
            while not (self._open.is_set() and may_run.is_set()):
                await may_run.wait()
                await self._open.wait()
            self.running += 1
            self._idle.clear()
            try:
                with self._turn(name) as turn:
                    yield turn
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[PolicyTurn]:
        """Return the weights for a policy's request."""
        yield PolicyTurn(self.version, None, self.sent, len(self.sent))

    def expecting(self, source: WeightSource) -> contextlib.AbstractContextManager[None]:
        """Announce that this server will take weights, so that others wait for it."""
        return contextlib.nullcontext()

    def prepare(self, name: str, source: WeightSource, version: PolicyVersion) -> NewWeights:
        """Write new weights for the server. A file that a server of this machine can read is used directly."""
        named = self.fitting(source)
        if isinstance(source, FileWeights) and self.process is not None:
            return WrittenWeights(source.path, is_own=False)
        path = self.folder / f"{version}.safetensors"
        try:
            write_weights(LocalWeights(named), path, self.dtype)
            os.chmod(path, 0o600)
        except OSError as error:
            raise ModelError(f"new weights can't be written to {self.folder}: {error}") from error
        return WrittenWeights(path, is_own=True)

    def fitting(self, source: WeightSource) -> list[tuple[str, Tensor]]:
        """Return all weights with their names, [n, d] or [d], after validation against the server's model."""
        named = list(source.tensors())
        for weight, tensor in named:
            if self.shapes.get(weight) != tuple(tensor.shape):
                raise ModelError(f"the engine's model has no weight {weight} of shape {tuple(tensor.shape)}")
        if missing := self.shapes.keys() - {weight for weight, _ in named}:
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        return named

    async def take(self, name: str, new: NewWeights, version: PolicyVersion, finish: bool, paused: bool) -> None:
        """Let the paused server read new weights. With `finish` running replies are finished first; otherwise they
        continue under the new weights. `paused`: the engine is paused already, and stays so.
        """
        async with self._updating:
            self._open.clear()
            try:
                if finish and not paused:
                    await self._idle.wait()
                self.sent.append(version)
                self.replacing = True
                if not paused:
                    await self.api.pause()
                await self._load(new, version)
                self.version = version
                if not paused:
                    await self.api.resume()
            finally:
                self.replacing = False
                self._open.set()

    async def _load(self, new: NewWeights, version: PolicyVersion) -> None:
        """Replace the weights of the paused server; see `take`."""
        assert isinstance(new, WrittenWeights)
        await self.api.load_weights(new.path, version)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return numbers, some of which grow when the server computes."""
        return self.counters.passes, self.counters.prefilled_tokens, self.sampled_tokens

    async def close(self) -> None:
        """Close the connections, and end the server if the job has started it."""
        if self.process is not None:
            await in_thread(self.process.stop)
        await self.api.close()
        await in_thread(lambda: shutil.rmtree(self.folder, ignore_errors=True))
