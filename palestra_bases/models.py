"""Base models in memory once, with one engine and one trainer for all uses of a server.

A base server's light jobs and the clients of the Tinker API are tenants of the same queue, and share sampling passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from palestra.config import TrainerConfig
from palestra.engine.base import Engine
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import ConfigError, EngineFailure
from palestra.threads import in_thread
from palestra.types.calls import FIRST_VERSION

if TYPE_CHECKING:
    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.causal_lm import CausalLM
    from palestra.models.loading import LoadedModels
    from palestra_bases.training.queue import TrainingQueue
    from palestra_bases.training.tenant_trainer import TenantTrainer

LoadAdapter = Callable[[str], Awaitable[None]]  # adds an adapter to the engine as a policy of the given name


@dataclass(slots=True, eq=False)
class _Loaded:
    """An adapter that the engine has, or is getting."""

    ready: asyncio.Future[None]
    users: int = 0


class AdapterCache:
    """The adapters loaded in an engine, with LRU eviction.

    Uses begin in the order of the requests. If all loaded adapters are in use, the next adapter waits for the first
    free one, and later uses wait behind it, so no adapter waits longer than the replies that began before it.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self.most = engine, most
        self._loaded: dict[str, _Loaded] = {}  # by the engine's policy, in the order in which they were used last
        self._leaving: dict[str, asyncio.Task[None]] = {}  # which the engine may still have
        self._turn = asyncio.Lock()  # fair: it is given in the order in which it was asked for
        self._freed = asyncio.Event()
        self.loads = 0

    @property
    def names(self) -> list[str]:
        """Return the policies that are loaded or loading, least recently used first."""
        return list(self._loaded)

    @contextlib.asynccontextmanager
    async def loaded(self, name: str, load: LoadAdapter) -> AsyncIterator[None]:
        """Hold an adapter loaded while the block is open. If it is not loaded, `load` is called with its name."""
        async with self._turn:
            known = self._loaded.pop(name, None)
            if known is None:
                while (leaving := self._leaving.get(name)) is not None:  # else the engine would have it already
                    await asyncio.wait((leaving,))
                await self._free_capacity()
                known = _Loaded(asyncio.ensure_future(load(name)))
                known.ready.add_done_callback(partial(self._came, name, known))
                self.loads += 1
            self._loaded[name] = known
            known.users += 1
        try:
            await asyncio.shield(known.ready)
            yield
        finally:
            known.users -= 1
            self._freed.set()

    async def remove(self, name: str) -> None:
        """Free the memory of an adapter if it is loaded or loading; requests that sample from it fail."""
        if (known := self._loaded.pop(name, None)) is not None:
            # A task of its own: a request that made room may be cancelled, and the engine would keep the adapter.
            self._leaving[name] = asyncio.create_task(self._remove(name, known))
        if (leaving := self._leaving.get(name)) is not None:
            await asyncio.shield(leaving)

    async def _remove(self, name: str, known: _Loaded) -> None:
        try:
            await asyncio.wait((known.ready,))  # else the engine would get the adapter after it was removed, for good
            await self._engine.remove_policy(name)
        finally:
            del self._leaving[name]
            self._freed.set()

    async def _free_capacity(self) -> None:
        """Return when one more adapter may be loaded."""
        while len(self._loaded) + len(self._leaving) >= self.most:
            idle = next((name for name, one in self._loaded.items() if not one.users and one.ready.done()), None)
            if idle is not None:
                await self.remove(idle)
            else:
                self._freed.clear()
                await self._freed.wait()

    def _came(self, name: str, loaded: _Loaded, ready: asyncio.Future[None]) -> None:
        failed = ready.cancelled() or ready.exception() is not None
        if failed and self._loaded.get(name) is loaded:
            del self._loaded[name]
        self._freed.set()


LOADED_ADAPTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedModelOptions:
    """The base models of a server, and how it computes.

    Attributes:
        models: names of base models, at least one.
        deterministic: whether samples and weights must not depend on what else is computed.
        slots: limit of adapters in training in memory, see `SharedTrainer`; None: all.
        loaded_adapters: limit of sampled but untrained adapters in memory; others are reloaded when used.
    """

    models: Sequence[str]
    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deterministic: bool = False
    slots: int | None = None
    loaded_adapters: int = LOADED_ADAPTERS


class SharedModels:
    """Frozen base models with their engine and trainer.

    Attributes:
        loaded: models with their tokenizers, by name.
        engine: its policy of a base model itself is `policy_of_base(name)`, without stop tokens.
        queue: in front of the trainer, which keeps all checkpoints: callers remove older ones.
    """

    def __init__(self, options: SharedModelOptions) -> None:
        import torch

        from palestra.engine.embedded.engine import EmbeddedEngine
        from palestra.engine.embedded.model_runner import PolicyModel
        from palestra.models.adapter_files import saved_adapter
        from palestra.models.device import device_of, precision_of, reproducible_products
        from palestra.models.loading import LoadedModels
        from palestra_bases.training.queue import TrainingQueue
        from palestra_bases.training.shared_trainer import SharedTrainer

        if len(set(options.models)) != len(options.models):
            raise ConfigError("a base model is named twice")
        for name in options.models:
            if saved_adapter(name) is not None:
                raise ConfigError(f"{name} is an adapter; name its base here, and the adapter where it is used")
        if options.deterministic:
            reproducible_products()
            torch.use_deterministic_algorithms(True)
        self.options = options
        self._models: LoadedModels = LoadedModels()
        self._device = device_of(options.engine.device, "--device")
        self._dtype = precision_of(options.engine.dtype, self._device)
        self.loaded: Mapping[str, tuple[CausalLM, Any]] = {
            name: self._models.frozen(name, self._dtype, self._device) for name in options.models
        }
        if seeing := [name for name, (model, _) in self.loaded.items() if model.vision is not None]:
            raise ConfigError(f"{seeing[0]} sees, and base servers are for models that read text only")
        policies = {
            policy_of_base(name): PolicyModel(model=model, stop_ids=frozenset())
            for name, (model, _) in self.loaded.items()
        }
        self.engine: EmbeddedEngine = EmbeddedEngine(policies, options.engine, options.deterministic)
        self.queue: TrainingQueue = TrainingQueue(
            SharedTrainer(options.trainer, sys.maxsize, self._models, options.deterministic, options.slots)
        )
        self.adapters = AdapterCache(self.engine, options.loaded_adapters)

    def numerics(self) -> dict[str, str]:
        """Return what computes here, with threads and precisions; see `palestra.models.numerics`."""
        import torch

        from palestra.models.numerics import numerics

        engine, trainer = self.options.engine, self.options.trainer
        found = numerics(self._device.type == "cpu" and "bfloat16" in (engine.dtype, trainer.dtype))
        for name, part in (("engine", engine), ("trainer", trainer)):
            found[f"{name}_threads"] = str(part.threads or torch.get_num_threads())
            found[f"{name}_dtype"] = part.dtype
        return found

    def trainer_of(self, tenant: str, weight: float = 1.0) -> TenantTrainer:
        """Return a tenant's trainer. All its clients have one share of the tokens together, by `weight`."""
        from palestra_bases.training.tenant_trainer import TenantTrainer

        self.queue.add_tenant(tenant, weight)
        return TenantTrainer(self.queue, tenant)

    async def add_policy(self, policy: str, model: str, adapter: Any = None, **more: Any) -> None:
        """Add a policy of version 0.0 to the engine.

        Args:
            model: a base model, or the folder of an adapter of one.
            adapter: of a trained policy, whose weights will change; None: the weights are those of `model`.
            more: of `PolicyModel`: stop tokens, and grammars.
        """
        from palestra.engine.embedded.model_runner import PolicyModel

        def load() -> PolicyModel:
            if adapter is None:
                found = self._models.frozen(model, self._dtype, self._device)[0]
            else:
                found = self._models.adapted(model, adapter, None, self._dtype, self._device)[0]
            return PolicyModel(model=found, **{"stop_ids": frozenset(), **more})

        await self.engine.add_model(policy, await in_thread(load), FIRST_VERSION)

    async def failed(self) -> None:
        """Wait until the engine fails, and raise the reason."""
        raise EngineFailure(await self.engine.failure())

    async def close(self) -> None:
        """Stop the engine and the trainer."""
        await self.engine.close()
        await self.queue.close()


def policy_of_base(name: str) -> str:
    """Return the engine's policy name of a base model itself, which jobs and clients cannot use."""
    return f"base {name}"


@contextlib.asynccontextmanager
async def shared_models(options: SharedModelOptions) -> AsyncIterator[SharedModels]:
    """Hold base models loaded while the block is open."""
    shared = await in_thread(lambda: SharedModels(options))
    try:
        yield shared
    finally:
        await shared.close()
