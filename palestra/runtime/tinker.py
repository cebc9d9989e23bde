"""Wires a Tinker server: base models in memory once, one engine and one trainer over them, the journal, and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.config import EmbeddedEngineConfig, TrainerConfig
from palestra.errors import ConfigError
from palestra.http.server import listen, served, url_of
from palestra.http.tenant_keys import Tenants
from palestra.runtime.run_dir import starting_in
from palestra.threads import in_thread
from palestra.tinker.bases import Base, Bases
from palestra.tinker.limits import Limits
from palestra.tinker.routes import create_tinker_app
from palestra.tinker.service import TinkerService
from palestra.tinker.tables import open_journal
from palestra.types.calls import PolicyVersion
from palestra.waiting import race

if TYPE_CHECKING:
    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.models.loading import LoadedModels
    from palestra.trainer.work_queue import TrainingQueue

KEPT = 2  # checkpoints of a model from which it is restored: the newest, and one for when that is damaged
JOURNAL, KEYS = "tinker.db", "keys"
PREFIX = "tml-"  # clients refuse keys that begin with something else


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerOptions:
    """How a Tinker server is started.

    Attributes:
        models: names of base models, at least one.
        folder: of the server: its journal, its keys, and what is trained.
        host, port: where it listens.
        tenants: names, each of which has a key in `folder/keys`.
        engine, trainer: as a job has them.
        deterministic: whether a model's samples and weights must not depend on what is computed beside them.
        limits: of the tenants.
        adapters: folders of adapters that every tenant may load, by name.
    """

    models: Sequence[str]
    folder: Path
    host: str = "127.0.0.1"
    port: int = 7412
    tenants: Sequence[str] = ("default",)
    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deterministic: bool = False
    limits: Limits = field(default_factory=Limits)
    adapters: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerServer:
    """A server that listens.

    Attributes:
        url: for `base_url` of a client.
        tenants: the keys.
        service: behind the routes.
        bases: the base models.
        queue: of what the models are trained with.
    """

    url: str
    tenants: Tenants
    service: TinkerService
    bases: Bases
    queue: TrainingQueue


@contextlib.asynccontextmanager
async def tinker_server(options: TinkerOptions) -> AsyncIterator[TinkerServer]:
    """Serve the Tinker API inside of the block.

    Args:
        options: of the server.

    Raises:
        RunInUse: another process serves from this folder.
        ConfigError: an option can't be used.
        ModelError: a base model can't be loaded.
    """
    with starting_in(options.folder) as start:
        tenants = Tenants(options.folder / KEYS, options.tenants, PREFIX)
        listener = listen(options.host, options.port)
        with contextlib.closing(listener):
            engine, models, bases = await in_thread(lambda: _load(options), daemon=False)
            db = open_journal(options.folder / JOURNAL)
            start.succeeded = True
            try:
                queue = _queue(options, models)
                try:
                    service = await _service(options, queue, engine, models, bases, db)
                    try:
                        async with served(create_tinker_app(service, tenants), listener):
                            yield TinkerServer(
                                url=url_of(listener), tenants=tenants, service=service, bases=bases, queue=queue
                            )
                    finally:
                        await service.stop()
                finally:
                    await queue.close()
            finally:
                await engine.close()
                db.close()


def _load(options: TinkerOptions) -> tuple[EmbeddedEngine, LoadedModels, Bases]:
    """Load the base models, and start an engine that samples from them.

    Raises:
        ConfigError: a name is given twice.
        ModelError: a model can't be loaded.
    """
    import torch

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.device import device_of, reproducible_products
    from palestra.models.loading import LoadedModels

    if len(set(options.models)) != len(options.models):
        raise ConfigError("a base model is named twice")
    if options.deterministic:
        reproducible_products()
        torch.use_deterministic_algorithms(True)
    models, dtype = LoadedModels(), getattr(torch, options.engine.dtype)
    device = device_of(options.engine.device, "engine.device")
    policies, bases = dict[str, PolicyModel](), list[Base]()
    for name in options.models:
        model, tokenizer = models.frozen(name, dtype, device)
        # Nothing ends a reply but what a request says: clients may also ask for replies that nothing ends.
        policies[name] = PolicyModel(model=model, stop_ids=frozenset())
        bases.append(_base(name, model, tokenizer))
    return EmbeddedEngine(policies, options.engine, options.deterministic), models, Bases(bases)


def _base(name: str, model: Any, tokenizer: Any) -> Base:
    """Return what clients and adapters need to know of a loaded model."""
    from palestra.models.adapters import linear_layers
    from palestra.models.catalog import model_folder

    return Base(
        name=name,
        tokenizer_id=str(model_folder(name)),
        tokenizer=tokenizer,
        architecture=type(model.model).__name__,
        vocab_size=model.vocab_size,
        max_context=model.max_positions,
        layers=tuple(linear_layers(model.model)),
    )


def _queue(options: TinkerOptions, models: LoadedModels) -> TrainingQueue:
    """Return the queue before the trainer, whose tenants are the server's."""
    from palestra.trainer.torch_trainer import TorchTrainer
    from palestra.trainer.work_queue import TrainingQueue

    return TrainingQueue(TorchTrainer(options.trainer, KEPT, models, options.deterministic))


async def _service(
    options: TinkerOptions, queue: TrainingQueue, engine: EmbeddedEngine, models: LoadedModels, bases: Bases, db: Any
) -> TinkerService:
    """Return the service, which continues what was interrupted.

    Args:
        options: of the server.
        queue: has the trainer.
        engine: has the base models.
        models: of this process.
        bases: the base models.
        db: the journal.
    """
    import torch

    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.device import device_of
    from palestra.trainer.tenant_trainer import TenantTrainer

    dtype, device = getattr(torch, options.engine.dtype), device_of(options.engine.device, "engine.device")

    async def load(name: str, folder: Path) -> None:
        model, _ = await in_thread(lambda: models.frozen(str(folder), dtype, device))
        await engine.add_model(name, PolicyModel(model=model, stop_ids=frozenset()), PolicyVersion(0, 0))

    def trainer_of(tenant: str) -> TenantTrainer:
        queue.add_tenant(tenant)
        return TenantTrainer(queue, tenant)

    service = TinkerService(trainer_of, engine, load, bases, db, options.folder, options.limits)
    await service.saved.forget_brought()
    for name, folder in options.adapters.items():
        await _bring(service, name, folder)
    await service.start()
    return service


async def _bring(service: TinkerService, name: str, folder: Path) -> None:
    """Let every tenant load an adapter of the operator's.

    Raises:
        ConfigError: the folder has none.
        NotFound: it is of a base model that is not served.
    """
    from palestra.models.adapter_files import saved_adapter

    found = await in_thread(lambda: saved_adapter(str(folder)))
    if found is None:
        raise ConfigError(f"{folder} is no adapter: it has no adapter_config.json")
    await service.bring(name, folder, found.config, found.base)


async def serve_tinker(options: TinkerOptions, ready: Callable[[TinkerServer], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Args:
        options: of the server.
        ready: is called when the server listens.
        stop: ends it.

    Raises:
        StoreError: the journal can't be written any more.
        ConfigError, ModelError: see `tinker_server`.
    """
    async with tinker_server(options) as server:
        ready(server)
        winner = await race(_stopped(stop), server.service.failure())
        if winner.index == 1 and winner.result is not None:
            raise winner.result


async def _stopped(stop: asyncio.Event) -> None:
    await stop.wait()
