"""Wires a base server: the socket for jobs over one model, its engine and its trainer, and perhaps the Tinker API."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.engine.base import Engine, EngineRequest
from palestra.errors import ConfigError
from palestra.models.weights import WeightSource
from palestra.runtime.run_dir import starting_in
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SampledTokens, TokenSequence
from palestra_bases.base import BaseDescription, SamplerSpec
from palestra_bases.models import (
    AdapterCache,
    LoadAdapter,
    SharedModelOptions,
    SharedModels,
    shared_models,
)
from palestra_bases.server import HostedJobs
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.serving import TinkerOptions, TinkerServer, tinker_server

if TYPE_CHECKING:
    from palestra.grammars.pool import Grammars
    from palestra.trainer.base import PolicySpec, Trainer
    from palestra_bases.training.shares import QueueLoad


class AdapterEngine:
    """The methods of `Engine` that name a policy, over an engine that has only some of the adapters loaded at a time.

    Trained policies and the base itself are always loaded.
    """

    def __init__(self, engine: Engine, cache: AdapterCache) -> None:
        self._engine, self._cache = engine, cache
        self._loads: dict[str, LoadAdapter] = {}  # of policies that need not be in memory

    async def add_adapter(self, name: str, load: LoadAdapter) -> None:
        """Add an adapter that does not change, of version 0.0; load it once as a check."""
        async with self._cache.loaded(name, load):
            self._loads[name] = load

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        """Stream a reply, after loading the adapter if necessary; see `Engine.generate`."""
        async with self._having(request.policy):
            pieces = self._engine.generate(request)
            async with contextlib.aclosing(pieces) as reply:  # type: ignore[type-var]  # an async generator
                async for piece in reply:
                    yield piece

    async def score(self, policy: str, prompt: TokenSequence) -> list[float]:
        """Return the log-probability of each prompt token but the first; see `Engine.score`."""
        async with self._having(policy):
            return await self._engine.score(policy, prompt)

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace the weights of a trained policy; see `Engine.sync_weights`."""
        if policy in self._loads:
            raise ConfigError(f"{policy} is never trained, and keeps its weights")
        await self._engine.sync_weights(policy, version, source)

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy; see `Engine.add_policy`."""
        if like not in self._loads:
            await self._engine.add_policy(name, like, version, source)
        elif source is not None:
            raise ConfigError(f"{like} is never trained, and there are no other weights of it")
        else:
            await self.add_adapter(name, self._loads[like])

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy; see `Engine.remove_policy`."""
        if self._loads.pop(name, None) is not None:
            await self._cache.remove(name)
        else:
            await self._engine.remove_policy(name)

    @contextlib.asynccontextmanager
    async def _having(self, policy: str) -> AsyncIterator[None]:
        load = self._loads.get(policy)
        if load is None:
            yield
            return
        async with self._cache.loaded(policy, load):
            yield


KEYS, SOCKET, PREFIX = "keys", "socket", "pb-"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOptions:
    """Options of a base server.

    Attributes:
        shared: the base model, and how it computes.
        host: address to listen on, with a port.
        runs: parent folder of jobs, for several tenants with a subfolder for each; the server reads and writes no file
            elsewhere.
        tenants: names, each with a key in `folder/keys`.
        most_policies: limit per job.
    """

    shared: SharedModelOptions
    folder: Path
    port: int | None = None
    host: str = "127.0.0.1"
    runs: Path = Path("runs")
    tenants: Sequence[str] = ("default",)
    most_policies: int = 16
    tinker: TinkerOptions | None = None

    @property
    def model(self) -> str:
        """Return the name of the base, as in `model` of a job."""
        (name,) = self.shared.models
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseServer:
    """A listening base server."""

    address: str
    tenants: Tenants
    jobs: HostedJobs
    shared: SharedModels
    tinker: TinkerServer | None = None

    async def failed(self) -> None:
        """Wait until a part of the server fails, and raise the reason."""
        await (self.shared.failed() if self.tinker is None else self.tinker.failed())


@contextlib.asynccontextmanager
async def base_server(options: BaseOptions) -> AsyncIterator[BaseServer]:
    """Serve a base while the block is open. Raises RunInUse if another process serves from this folder."""
    with starting_in(options.folder) as start:
        tenants = Tenants(options.folder / KEYS, options.tenants, PREFIX)
        models = shared_models(options.shared)
        async with contextlib.AsyncExitStack() as stack:
            tinker = None
            if options.tinker is not None:
                tinker = await stack.enter_async_context(tinker_server(options.tinker, models))
                shared = tinker.shared
            else:
                shared = await stack.enter_async_context(models)
            own = len(tenants.files) > 1
            base = await in_thread(lambda: LoadedBase(options, shared, own_folders=own))
            stack.callback(base.close)
            start.succeeded = True
            server = HostedJobs(base, tenants.of, options.most_policies)
            socket = options.folder / SOCKET if options.port is None else None
            address = await stack.enter_async_context(server.listen(socket, options.host, options.port or 0))
            yield BaseServer(address=address, tenants=tenants, jobs=server, shared=shared, tinker=tinker)


class LoadedBase:
    """A frozen model, with the engine and the trainer that all jobs of a base server share."""

    def __init__(self, options: BaseOptions, shared: SharedModels, own_folders: bool = False) -> None:
        """Prepare the model for jobs. `own_folders`: each tenant has the subfolder of its name in `options.runs`."""
        from palestra.engine.embedded.engine import token_budget
        from palestra.grammars.matcher import vocabulary_of
        from palestra.grammars.pool import Grammars
        from palestra.renderers import select_renderer

        self._options, self.shared = options, shared
        self._runs, self._own, self._own_folders = options.runs.resolve(), options.folder.resolve(), own_folders
        self._weights: dict[str, float] = {}
        self._tenants: set[str] = set()
        model, tokenizer = shared.loaded[options.model]
        self._stop_ids = frozenset(select_renderer(tokenizer).stop_ids)
        self._grammars: Grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size))
        self._engine = AdapterEngine(shared.engine, shared.adapters)
        self.description = BaseDescription(
            model=options.model,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            max_context=token_budget(model, options.shared.engine),
            dtype=options.shared.engine.dtype,
            trainer_dtype=options.shared.trainer.dtype,
            deterministic=options.shared.deterministic,
            tokenizer=_files(tokenizer),
            tokenizer_name=str(tokenizer.name_or_path),
            numerics=shared.numerics(),
        )

    def parts_of(self, tenant: str) -> tuple[AdapterEngine, Trainer]:
        """Return the shared engine, and the tenant's queue to the trainer. Policies have full names there."""
        self._tenants.add(tenant)
        return self._engine, self.shared.trainer_of(tenant, self._weights.get(tenant, 1.0))

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the tenants' weights from the next round on; 1 for others."""
        self._weights = dict(weights)
        for tenant in self._tenants & weights.keys():
            self.shared.queue.add_tenant(tenant, weights[tenant])

    async def remove(self, tenant: str) -> None:
        """Remove a tenant with its policies from the queue; its requests fail, even running ones."""
        if tenant in self._tenants:
            self._tenants.discard(tenant)
            await self.shared.queue.remove_tenant(tenant)

    @property
    def load(self) -> QueueLoad:
        """Return the load of the trainer's queue."""
        return self.shared.queue.load()

    def folder_of(self, tenant: str) -> Path:
        """Return the folder for all files of a tenant's jobs, absolute and without symbolic links."""
        return self._runs / tenant if self._own_folders else self._runs

    def own_folder(self) -> Path:
        """Return the folder with the keys, which jobs cannot write to."""
        return self._own

    async def sample(self, name: str, spec: SamplerSpec) -> None:
        """Add a policy of version 0.0 to the engine; one that is not trained may be evicted. Raises ConfigError if
        the model is another base, or the adapter does not fit; ModelError if files are missing or damaged.
        """
        await in_thread(lambda: self._check_model(spec.model))
        own = {"stop_ids": self._stop_ids, "grammars": self._grammars}

        async def load(policy: str) -> None:
            await self.shared.add_policy(policy, spec.model, spec.adapter, **own)

        if spec.adapter is None and not self.is_base(spec.model):
            await self._engine.add_adapter(name, load)
        else:
            await load(name)

    def is_base(self, model: str) -> bool:
        """Return whether a model is the base itself, under any of its names."""
        from palestra.models.loading import canonical_name

        return model == self._options.model or canonical_name(model) == canonical_name(self._options.model)

    def check(self, spec: PolicySpec) -> None:
        """Raise ConfigError for a policy without an adapter, or of another base."""
        if spec.adapter is None:
            raise ConfigError(
                "a policy on a shared base trains an adapter, because the base never changes; give it one"
            )
        for model in (spec.model, spec.reference, spec.teacher):
            if model is not None:
                self._check_model(model)

    def _check_model(self, model: str) -> None:
        from palestra.models.adapter_files import base_of

        of = model if self.is_base(model) else base_of(model)
        if not self.is_base(of):
            said = f"{model!r}" if of == model else f"{model!r}, an adapter of {of!r},"
            raise ConfigError(
                f"the job's model is {said} and this base server has {self._options.model!r}; name that, or another "
                "server"
            )

    def close(self) -> None:
        """End the process that compiles grammars."""
        self._grammars.close()


def _files(tokenizer: Any) -> Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    with tempfile.TemporaryDirectory(prefix="palestra-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: np.fromfile(path, np.uint8) for path in sorted(Path(folder).iterdir()) if path.is_file()}
