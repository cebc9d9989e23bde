"""A policy that is an adapter on a server of its base, and its past versions."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from palestra.config import AdapterConfig
from palestra.errors import EngineFailure, ModelError
from palestra.models.adapter_files import write_matrices
from palestra.models.weights import WeightSource
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion
from palestra_engines.external.served_policy import ExternalPolicy, NewWeights, PolicyTurn, WrittenWeights

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
