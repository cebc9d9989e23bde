"""Wires a base server: one model in memory once, an engine and a trainer over it, and the socket for jobs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.backend.base import FIRST_VERSION, BaseDescription, SamplerSpec
from palestra.backend.server import BackendServer
from palestra.config import EmbeddedEngineConfig, TrainerConfig
from palestra.errors import ConfigError, EngineFailure
from palestra.http.tenant_keys import Tenants
from palestra.runtime.run_dir import starting_in
from palestra.threads import in_thread
from palestra.waiting import race

if TYPE_CHECKING:
    from palestra.engine.base import Engine
    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.grammars.pool import Grammars
    from palestra.models.loading import LoadedModels
    from palestra.trainer.base import PolicySpec, Trainer
    from palestra.trainer.queue_load import QueueLoad
    from palestra.trainer.work_queue import TrainingQueue

KEYS, SOCKET, PREFIX = "keys", "socket", "pb-"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOptions:
    """How a base server is started.

    Attributes:
        model: name of the base, as `model` of a job has it.
        folder: of the server: its keys, and its socket.
        port: to listen on, 0: any free one; None: the socket in `folder`.
        host: where it listens, with a port.
        runs: the folder below which jobs have theirs; the server reads and writes no file elsewhere.
        tenants: names, each of which has a key in `folder/keys`.
        engine, trainer: as a job has them.
        deterministic: whether samples and weights must not depend on what is computed beside them.
        lease_seconds: how long a job whose connection is lost keeps its policies.
        most_policies: how many policies a job may have.
    """

    model: str
    folder: Path
    port: int | None = None
    host: str = "127.0.0.1"
    runs: Path = Path("runs")
    tenants: Sequence[str] = ("default",)
    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deterministic: bool = False
    lease_seconds: float = 60.0
    most_policies: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseServer:
    """A base server that listens.

    Attributes:
        address: for `policies.NAME.base` of jobs.
        tenants: the keys.
        jobs: those that are connected.
    """

    address: str
    tenants: Tenants
    jobs: BackendServer


@contextlib.asynccontextmanager
async def base_server(options: BaseOptions) -> AsyncIterator[tuple[BaseServer, LoadedBase]]:
    """Serve a base inside of the block.

    Args:
        options: of the server.

    Raises:
        RunInUse: another process serves from this folder.
        ConfigError: an option can't be used.
        ModelError: the model can't be loaded.
    """
    with starting_in(options.folder) as start:
        tenants = Tenants(options.folder / KEYS, options.tenants, PREFIX)
        base = await in_thread(lambda: LoadedBase(options), daemon=False)
        start.succeeded = True
        try:
            server = BackendServer(base, tenants.of, options.lease_seconds, options.most_policies)
            socket = options.folder / SOCKET if options.port is None else None
            async with server.listen(socket, options.host, options.port or 0) as address:
                yield BaseServer(address=address, tenants=tenants, jobs=server), base
        finally:
            await base.close()


class LoadedBase:
    """Implements `SharedBase` with a model of this process."""

    def __init__(self, options: BaseOptions, own_folders: bool = False) -> None:
        """Load the model, and start an engine over it.

        Args:
            options: of the server.
            own_folders: whether each tenant has the folder of its name in `options.runs`, in which all its files are.

        Raises:
            ModelError: the model can't be loaded.
            ConfigError: it is an adapter.
        """
        import torch

        from palestra.engine.embedded.engine import EmbeddedEngine, token_budget
        from palestra.engine.embedded.model_runner import PolicyModel
        from palestra.grammars.pool import Grammars
        from palestra.grammars.vocabulary import vocabulary_of
        from palestra.models.adapter_files import saved_adapter
        from palestra.models.device import device_of, reproducible_products
        from palestra.models.loading import LoadedModels
        from palestra.renderers import select_renderer
        from palestra.trainer.torch_trainer import TorchTrainer
        from palestra.trainer.work_queue import TrainingQueue

        if saved_adapter(options.model) is not None:
            raise ConfigError(f"{options.model} is an adapter; name its base, and the adapter as `model` of a job")
        if options.deterministic:
            reproducible_products()
            torch.use_deterministic_algorithms(True)
        self._options = options
        self._runs, self._own_folders = options.runs.resolve(), own_folders
        self._weights: dict[str, float] = {}
        self._tenants: set[str] = set()
        self._models: LoadedModels = LoadedModels()
        self._dtype, self._device = getattr(torch, options.engine.dtype), device_of(options.engine.device, "--device")
        model, tokenizer = self._models.frozen(options.model, self._dtype, self._device)
        self._stop_ids = frozenset(select_renderer(tokenizer).stop_ids)
        self._grammars: Grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size))
        own = PolicyModel(model=model, stop_ids=self._stop_ids, grammars=self._grammars)
        # The engine has a policy of the base itself, which no job can name and which keeps the weights in memory.
        self._engine: EmbeddedEngine = EmbeddedEngine({"": own}, options.engine, options.deterministic)
        # Each job removes its own older checkpoints.
        self._queue: TrainingQueue = TrainingQueue(
            TorchTrainer(options.trainer, sys.maxsize, self._models, options.deterministic)
        )
        self.description = BaseDescription(
            model=options.model,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            max_context=token_budget(model, options.engine),
            dtype=options.engine.dtype,
            trainer_dtype=options.trainer.dtype,
            deterministic=options.deterministic,
            tokenizer=_files(tokenizer),
            tokenizer_name=str(tokenizer.name_or_path),
        )

    def parts_of(self, tenant: str) -> tuple[Engine, Trainer]:
        """Return the engine, which is the same for all tenants, and the tenant's place in the queue of the trainer."""
        from palestra.trainer.tenant_trainer import TenantTrainer

        self._queue.add_tenant(tenant, self._weights.get(tenant, 1.0))
        self._tenants.add(tenant)
        return self._engine, TenantTrainer(self._queue, tenant)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the shares of tenants in the trainer's tokens, from the next round on; others have a weight of 1."""
        self._weights = dict(weights)
        for tenant in self._tenants & weights.keys():
            self._queue.add_tenant(tenant, weights[tenant])

    async def remove(self, tenant: str) -> None:
        """Forget a tenant in the queue, with its policies; see `SharedBase.remove`."""
        if tenant in self._tenants:
            self._tenants.discard(tenant)
            await self._queue.remove_tenant(tenant)

    @property
    def load(self) -> QueueLoad:
        """Return what waits in the queue of the trainer."""
        return self._queue.load()

    def folder_of(self, tenant: str) -> Path:
        """Return the folder of all runs, or that of the tenant's."""
        return self._runs / tenant if self._own_folders else self._runs

    async def sample(self, name: str, spec: SamplerSpec) -> None:
        """Load an adapter, or the base itself, for the engine; see `SharedBase.sample`."""
        from palestra.engine.embedded.model_runner import PolicyModel

        def load() -> Any:
            self._check_model(spec.model)
            if spec.adapter is None:
                return self._models.frozen(spec.model, self._dtype, self._device)[0]
            return self._models.adapted(spec.model, spec.adapter, None, self._dtype, self._device)[0]

        model = await in_thread(load)
        policy = PolicyModel(model=model, stop_ids=self._stop_ids, grammars=self._grammars)
        await self._engine.add_model(name, policy, FIRST_VERSION)

    def is_base(self, model: str) -> bool:
        """Return whether a model is the base itself, under any of its names."""
        from palestra.models.loading import place_of

        return model == self._options.model or place_of(model) == place_of(self._options.model)

    def check(self, spec: PolicySpec) -> None:
        """Refuse a policy without an adapter, or of another base; see `SharedBase.check`."""
        if spec.adapter is None:
            raise ConfigError(
                "a policy on a shared base trains an adapter, because the base never changes; give it one"
            )
        for model in (spec.model, spec.reference, spec.teacher):
            if model is not None:
                self._check_model(model)

    def _check_model(self, model: str) -> None:
        """Refuse a model that is neither the base nor an adapter of it."""
        from palestra.models.adapter_files import saved_adapter

        saved = None if self.is_base(model) else saved_adapter(model)
        of = model if saved is None else saved.base
        if not self.is_base(of):
            said = f"{model!r}" if saved is None else f"{model!r}, an adapter of {of!r},"
            raise ConfigError(
                f"the job's model is {said} and this base server has {self._options.model!r}; name that, or another "
                "server"
            )

    async def failure(self) -> str:
        """Return when the engine can't continue, and say why."""
        return await self._engine.failure()

    async def close(self) -> None:
        """Stop the engine and the trainer."""
        await self._engine.close()
        await self._queue.close()
        self._grammars.close()


def _files(tokenizer: Any) -> Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the files of a tokenizer by name, uint8 [bytes]."""
    with tempfile.TemporaryDirectory(prefix="palestra-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: np.fromfile(path, np.uint8) for path in sorted(Path(folder).iterdir()) if path.is_file()}


async def serve_base(options: BaseOptions, ready: Callable[[BaseServer], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Args:
        options: of the server.
        ready: is called when the server listens.
        stop: ends it.

    Raises:
        EngineFailure: the engine can't continue; jobs go on when the server is started again.
        ConfigError, ModelError: see `base_server`.
    """
    async with base_server(options) as (server, base):
        ready(server)
        winner = await race(stop.wait(), base.failure())
        if winner.index == 1:
            raise EngineFailure(str(winner.result))
