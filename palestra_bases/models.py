"""Base models in memory once, with one engine and one trainer over them, for all that a server has to do with them.

A base server's light jobs and the clients of the Tinker API are tenants of the same queue, and are sampled for in the
same passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palestra.config import TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import ConfigError
from palestra.threads import in_thread
from palestra.types.calls import FIRST_VERSION
from palestra_bases.adapter_cache import AdapterCache

if TYPE_CHECKING:
    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.causal_lm import CausalLM
    from palestra.models.loading import LoadedModels
    from palestra_bases.training.queue import TrainingQueue
    from palestra_bases.training.tenant_trainer import TenantTrainer

LOADED_ADAPTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedModelOptions:
    """Which base models a server has, and how it computes.

    Attributes:
        models: names of base models, at least one.
        engine, trainer: as a job has them.
        deterministic: whether samples and weights must not depend on what is computed beside them.
        slots: adapters in training that are in memory at the same time, as `SharedTrainer` has it; None: all.
        loaded_adapters: adapters that are sampled from without being trained, and that are in memory at the same time;
            others are loaded again when they are used.
    """

    models: Sequence[str]
    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deterministic: bool = False
    slots: int | None = None
    loaded_adapters: int = LOADED_ADAPTERS


class SharedModels:
    """Base models whose own weights never change, and what computes with them.

    Attributes:
        loaded: each base model with its tokenizer, by its name.
        engine: samples; its policy of a base model itself is `policy_of_base(name)`, and ends no reply by itself.
        queue: before the trainer. The trainer keeps all checkpoints: whoever has them written removes older ones.
        adapters: those that the engine has without their being trained.
    """

    def __init__(self, options: SharedModelOptions) -> None:
        """Load the models, and start an engine and a trainer over them.

        Raises:
            ConfigError: a model is named twice, is an adapter, or sees.
            ModelError: a model can't be loaded.
        """
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
        """Return a tenant's place in the queue; jobs and other clients of one tenant have one share together.

        Args:
            weight: its share of the tokens beside those of others.
        """
        from palestra_bases.training.tenant_trainer import TenantTrainer

        self.queue.add_tenant(tenant, weight)
        return TenantTrainer(self.queue, tenant)

    async def add_policy(self, policy: str, model: str, adapter: Any = None, **more: Any) -> None:
        """Give the engine one more policy, of version 0.0.

        Args:
            policy: its name in the engine, which is new.
            model: a base model, or the folder of an adapter of one.
            adapter: of a policy that is trained, so that its weights will change; None: the weights are those of
                `model`.
            more: of `PolicyModel`: what ends a reply, and grammars.

        Raises:
            ConfigError: the adapter does not fit.
            ModelError: files are missing or damaged.
        """
        from palestra.engine.embedded.model_runner import PolicyModel

        def load() -> PolicyModel:
            if adapter is None:
                found = self._models.frozen(model, self._dtype, self._device)[0]
            else:
                found = self._models.adapted(model, adapter, None, self._dtype, self._device)[0]
            return PolicyModel(model=found, **{"stop_ids": frozenset(), **more})

        await self.engine.add_model(policy, await in_thread(load), FIRST_VERSION)

    async def close(self) -> None:
        """Stop the engine and the trainer."""
        await self.engine.close()
        await self.queue.close()


def policy_of_base(name: str) -> str:
    """Return the engine's name for the policy of a base model itself, which no job and no client can make up."""
    return f"base {name}"


@contextlib.asynccontextmanager
async def shared_models(options: SharedModelOptions) -> AsyncIterator[SharedModels]:
    """Have base models loaded inside of the block.

    Raises:
        ConfigError, ModelError: see `SharedModels`.
    """
    shared = await in_thread(lambda: SharedModels(options), daemon=False)
    try:
        yield shared
    finally:
        await shared.close()
