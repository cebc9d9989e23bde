"""Wires the Tinker API over base models of this process: the journal, the keys, and HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError
from palestra.http.server import listen, served, url_of
from palestra.runtime.run_dir import starting_in
from palestra.threads import in_thread
from palestra.waiting import race
from palestra_bases.models import SharedModels, policy_of_base
from palestra_bases.tenant_keys import Tenants
from palestra_bases.tinker.bases import Base, Bases
from palestra_bases.tinker.records import TinkerLimits
from palestra_bases.tinker.routes import create_tinker_app
from palestra_bases.tinker.samples import Sampling
from palestra_bases.tinker.service import TinkerService
from palestra_bases.tinker.tables import open_journal

JOURNAL, KEYS = "tinker.db", "keys"
PREFIX = "tml-"  # clients refuse keys that begin with something else


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerOptions:
    """How to serve the Tinker API.

    Attributes:
        folder: its journal, its keys, and training results.
        tenants: names, each with a key in `folder/keys`.
        adapters: folders of adapters that every tenant may load, by name.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = 7412
    tenants: Sequence[str] = ("default",)
    limits: TinkerLimits = field(default_factory=TinkerLimits)
    adapters: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerServer:
    """A listening server."""

    url: str
    tenants: Tenants
    service: TinkerService
    bases: Bases
    shared: SharedModels

    async def failed(self) -> None:
        """Wait until engine or journal fails, and raise the reason."""
        await race(self.shared.failed(), self.service.failed())


@contextlib.asynccontextmanager
async def tinker_server(
    options: TinkerOptions, models: AbstractAsyncContextManager[SharedModels]
) -> AsyncIterator[TinkerServer]:
    """Serve the Tinker API in the block; `models` are loaded when folder and port are free. Raises RunInUse."""
    with starting_in(options.folder) as start:
        tenants = Tenants(options.folder / KEYS, options.tenants, PREFIX)
        listener = listen(options.host, options.port)
        with contextlib.closing(listener):
            async with models as shared:
                db = open_journal(options.folder / JOURNAL)
                start.succeeded = True
                try:
                    bases = Bases({name: _base(name, *loaded) for name, loaded in shared.loaded.items()})
                    service = await _service(options, shared, bases, db)
                    try:
                        async with served(create_tinker_app(service, tenants), listener):
                            yield TinkerServer(
                                url=url_of(listener), tenants=tenants, service=service, bases=bases, shared=shared
                            )
                    finally:
                        await service.stop()
                finally:
                    db.close()


def _base(name: str, model: Any, tokenizer: Any) -> Base:
    from palestra.models.adapters import head_layer, linear_layers
    from palestra.models.catalog import model_folder

    return Base(
        name=name,
        policy=policy_of_base(name),
        tokenizer_id=str(model_folder(name)),
        tokenizer=tokenizer,
        architecture=type(model.model).__name__,
        vocab_size=model.vocab_size,
        max_context=model.max_positions,
        layers=tuple(linear_layers(model.model)),
        head=next(iter(head_layer(model.model)), None),
    )


async def _service(options: TinkerOptions, shared: SharedModels, bases: Bases, db: Any) -> TinkerService:
    async def load(policy: str, folder: Path) -> None:
        await shared.add_policy(policy, str(folder))

    sampling = Sampling(engine=shared.engine, adapters=shared.adapters, load=load)
    service = TinkerService(shared.trainer_of, sampling, bases, db, options.folder, options.limits)
    await service.saved.forget_brought()
    for name, folder in options.adapters.items():
        await _bring(service, name, folder)
    await service.start()
    return service


async def _bring(service: TinkerService, name: str, folder: Path) -> None:
    from palestra.models.adapter_files import saved_adapter

    found = await in_thread(lambda: saved_adapter(str(folder)))
    if found is None:
        raise ConfigError(f"{folder} is no adapter: it has no adapter_config.json")
    await service.bring(name, folder, found.config, found.base)
