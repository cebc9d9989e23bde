"""One policy of an engine that is a server: its version, who may send requests, and how its weights are replaced.

It has a server of its own, or it is an adapter on a server of its base, which also keeps its past versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from palestra.config import AdapterConfig
from palestra.errors import ConfigError, EngineFailure, EngineKeyRefused, ModelError
from palestra.models.adapter_files import write_matrices
from palestra.models.tensor_file import write_weights
from palestra.models.weights import FileWeights, LocalWeights, WeightSource
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


_MATRICES = ("A.weight", "B.weight")  # of a linear layer


@dataclass(kw_only=True, eq=False, slots=True)
class LoadedAdapter:
    """One version of an adapter at the server, under a unique name.

    Attributes:
        folder: from which the server reads the adapter, possibly again; None: not this engine's to remove.
        users: number of requests that use it.
    """

    name: str
    folder: Path | None
    version: PolicyVersion
    users: int = 0


@dataclass(kw_only=True, eq=False)
class ServedAdapter(ExternalPolicy):
    """A policy whose server has its base's weights, and only gets adapters.

    Each version is loaded under its own name, and a request keeps its initial version, because a server does not report
    which version of an adapter sampled a token. So an update needs no pause, each reply has one version, and old keys
    and values are never reused. Unused versions are unloaded at the next update.

    Attributes:
        base: name of the server's model.
        first: folder of the initial adapter; None: the base's own weights, like an untrained adapter.
    """

    adapter: AdapterConfig
    base: str
    first: Path | None
    _loaded: dict[str, LoadedAdapter | None] = field(default_factory=dict)  # by policy; None: the base
    _retired: list[LoadedAdapter] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loaded[self.name] = None
        # A server that runs already may have adapters of an earlier job.
        self._names = (f"palestra-{secrets.token_hex(4)}-{number}" for number in itertools.count())

    async def begin(self) -> None:
        """Check whether the server fits, and load the initial adapter; see `ExternalPolicy`."""
        await self.api.check(self.dtype)
        if self.first is not None:
            await self.take(self.name, WrittenWeights(self.first, is_own=False), self.version, False, False)

    def version_of(self, name: str) -> PolicyVersion:
        """Return the adapter version that a new request is sampled from; see `ExternalPolicy`."""
        loaded = self._loaded.get(name)
        return self.version if loaded is None else loaded.version

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[PolicyTurn]:
        if name not in self._loaded:
            raise EngineFailure(f"the policy {name!r} was removed")
        loaded = self._loaded[name]
        if loaded is None:
            yield PolicyTurn(self.version, None, (), 0)
            return
        loaded.users += 1
        try:
            yield PolicyTurn(loaded.version, loaded.name, (), 0)
        finally:
            loaded.users -= 1

    def prepare(self, name: str, source: WeightSource, version: PolicyVersion) -> NewWeights:
        """Write an adapter into its own folder, in PEFT's format; see `ExternalPolicy`."""
        matrices = {weight: tensor.detach().to("cpu", self.dtype) for weight, tensor in source.tensors()}
        layers = self._layers(matrices)
        folder = self.folder / next(self._names)
        try:
            folder.mkdir(mode=0o700)
            write_matrices(
                folder, self.adapter, self.base, sorted({one.rpartition(".")[2] for one in layers}), matrices
            )
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ModelError(f"the adapter can't be written to {self.folder}: {error}") from error
        return WrittenWeights(folder, is_own=False)  # it stays as long as the server may read it

    def _layers(self, matrices: Mapping[str, Tensor]) -> set[str]:
        """Return the layers of an adapter, from the names of its matrices, [r, d] and [n, r]."""
        layers = {name.partition(".lora_")[0] for name in matrices}
        for layer in sorted(layers):
            out, width = (*self.shapes.get(f"{layer}.weight", ()), 0, 0)[:2]
            fitting = zip(_MATRICES, ((self.adapter.rank, width), (out, self.adapter.rank)), strict=True)
            for end, shape in fitting:
                found = matrices.get(f"{layer}.lora_{end}")
                if not out or found is None or tuple(found.shape) != shape:
                    raise ModelError(
                        f"the adapter's matrices of {layer} do not fit the engine's model: a server has them for "
                        "linear layers other than the head"
                    )
        return layers

    async def take(self, name: str, new: NewWeights, version: PolicyVersion, finish: bool, paused: bool) -> None:
        """Load an adapter, and sample later requests from it; see `ExternalPolicy`.

        `finish` and `paused` have no effect: replies always keep their version, and a paused server can load adapters.
        """
        assert isinstance(new, WrittenWeights)
        async with self._updating:
            loaded = LoadedAdapter(
                name=next(self._names),
                folder=None if new.path == self.first else new.path,
                version=version,
            )
            await self.api.load_adapter(loaded.name, new.path)
            self._replace(name, loaded)
            await self._unload()

    def copy(self, name: str, like: str) -> None:
        """Let a further policy be sampled from the present weights of another one of this server."""
        self._replace(name, self._loaded[like])

    async def remove(self, name: str) -> None:
        """Remove an added policy, and unload its adapter when it is unused."""
        async with self._updating:
            self._replace(name, None)
            del self._loaded[name]
            await self._unload()

    def _replace(self, name: str, loaded: LoadedAdapter | None) -> None:
        before, self._loaded[name] = self._loaded.get(name), loaded
        if before is not None and before not in self._loaded.values():
            self._retired.append(before)

    async def _unload(self) -> None:
        """Unload the adapters that no policy has and no request uses any more."""
        for one in [one for one in self._retired if not one.users]:
            await self.api.unload_adapter(one.name)
            self._retired.remove(one)
            if one.folder is not None:
                await in_thread(partial(shutil.rmtree, one.folder, ignore_errors=True))
