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
    """The weights from which a request is sampled that may be sent now.

    Attributes:
        version: of the weights with which the reply begins.
        adapter: name of the adapter at the server; None: the server's own weights.
        log: versions of all weights that the server has got; later versions are added while the request runs.
        before: how many of these versions the server had got before the request.
    """

    version: PolicyVersion
    adapter: str | None
    log: Sequence[PolicyVersion]
    before: int

    @property
    def sent(self) -> Sequence[PolicyVersion]:
        """Return the versions of the weights that were sent to the server since the request was."""
        return self.log[self.before :]


class NewWeights(Protocol):
    """New weights on their way to a server, as `ExternalPolicy.prepare` has made them."""

    def discard(self) -> None:
        """Free what was made for this update alone."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """New weights on the disk, or in shared memory.

    Attributes:
        path: of the file, or of the folder of an adapter.
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
    """A policy whose whole weights are in a server, and the server that samples from it.

    Attributes:
        name: of the policy.
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
        sampled_tokens: of all their replies so far.
        replacing: whether the server is paused, because it gets new weights.
        counters: what the server has said of itself at last.
        moved_bytes: of new weights that were broadcast to the server so far.
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
        """Ask the server whether it fits the policy, and make it ready; before anything else is sent.

        Raises:
            ConfigError: it does not fit, or asks for another key.
            EngineFailure: it does not answer.
        """
        try:
            await self.api.check(self.dtype)
            await self.api.set_version(self.version)
        except EngineKeyRefused as error:  # asking again would not help
            raise ConfigError(str(error)) from error

    def version_of(self, name: str) -> PolicyVersion:
        """Return the version of the weights that a request which begins now is sampled from.

        Args:
            name: of a policy that the server has.
        """
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
        """Say what a request of a policy is sampled from."""
        yield PolicyTurn(self.version, None, self.sent, len(self.sent))

    def expecting(self, source: WeightSource) -> contextlib.AbstractContextManager[None]:
        """Say that this server is going to take weights, so that others which take them can wait for it."""
        return contextlib.nullcontext()

    def prepare(self, name: str, source: WeightSource, version: PolicyVersion) -> NewWeights:
        """Write new weights for the server. A file that a server of this machine can read is left as it is.

        Raises:
            ModelError: they do not fit the server's model, or there is no room for the file.
        """
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
        """Return all weights with their names, [n, d] or [d], after they were compared with the server's model.

        Raises:
            ModelError: one is missing, is not known, or has another shape.
        """
        named = list(source.tensors())
        for weight, tensor in named:
            if self.shapes.get(weight) != tuple(tensor.shape):
                raise ModelError(f"the engine's model has no weight {weight} of shape {tuple(tensor.shape)}")
        if missing := self.shapes.keys() - {weight for weight, _ in named}:
            raise ModelError(f"no new weights were given for {', '.join(sorted(missing))}")
        return named

    async def take(self, name: str, new: NewWeights, version: PolicyVersion, finish: bool, paused: bool) -> None:
        """Let the server read new weights while it is paused.

        Args:
            new: what `prepare` has returned.
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
        """Return numbers of which one grows when the server computes."""
        return self.counters.passes, self.counters.prefilled_tokens, self.sampled_tokens

    async def close(self) -> None:
        """End the server, if the job has started it, and close the connections."""
        if self.process is not None:
            await in_thread(self.process.stop)
        await self.api.close()
        await in_thread(lambda: shutil.rmtree(self.folder, ignore_errors=True))
