"""Builds the parts of a job from its configuration: engine, trainer, policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.config import DEFAULT_CONTEXT, EmbeddedEngineConfig, FakeEngineConfig, JobConfig
from palestra.engine.base import Engine
from palestra.errors import ConfigError
from palestra.grammars.pool import Grammars
from palestra.renderers import ByteTokenizer, ChatMLRenderer, Renderer, select_renderer
from palestra.session import PolicyRuntime, PolicySet
from palestra.trainer.base import Trainer

if TYPE_CHECKING:
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.loading import LoadedModels
    from palestra.runtime.renewal import Renewable
    from palestra.trainer.sharded.trainer import ShardedTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that differ between a real job and one with a fake engine: what samples, what trains, the policies."""

    engine: Engine
    trainer: Trainer | None  # without a policy yet; None: nothing is trained
    policies: PolicySet
    renewable: Renewable | None = None  # the trainer, where its processes may be lost


def build_parts(config: JobConfig, weights: Mapping[str, str] | None = None) -> Parts:
    """Build the parts of a job, and load the models to sample from. A trainer loads its own copy of one that it gets.

    Args:
        config: the job.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name. None: none.

    Raises:
        ModelError: weights are missing, or the architecture is not supported.
        ConfigError: a `max_context` is more than its model has.
    """
    if isinstance(config.engine, FakeEngineConfig):
        return _fake(config, config.engine)
    return _embedded(config, config.engine, weights or {})


def _fake(config: JobConfig, settings: FakeEngineConfig) -> Parts:
    """Build a job without a model: neither torch nor transformers is imported."""
    from palestra.engine.fake import FakeEngine, digits_script
    from palestra.trainer.fake import FakeTrainer

    tokenizer = ByteTokenizer()
    engine = FakeEngine(digits_script(settings.reply_tokens, tokenizer.eos_token_id), settings.delay_seconds)
    runtimes = {
        name: PolicyRuntime(
            name=name, config=policy, renderer=ChatMLRenderer(tokenizer), engine=engine, grammars=Grammars()
        )
        for name, policy in config.policies.items()
    }
    return Parts(
        engine=engine,
        trainer=FakeTrainer(config.checkpoint.keep) if config.kind == "training" else None,
        policies=PolicySet.of(config, runtimes),
    )


def _embedded(config: JobConfig, settings: EmbeddedEngineConfig, weights: Mapping[str, str]) -> Parts:
    """Build a job whose engine and trainer are in this process, and share weights that never change."""
    import torch

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.models.device import reproducible_products
    from palestra.models.loading import LoadedModels

    if config.deterministic:
        reproducible_products()
        torch.use_deterministic_algorithms(True)
    models = LoadedModels()
    loaded = {
        name: _load(config, name, weights.get(name, policy.model), settings, models)
        for name, policy in config.policies.items()
    }
    engine = EmbeddedEngine({name: one.model for name, one in loaded.items()}, settings, config.deterministic)
    runtimes = {
        name: PolicyRuntime(
            name=name,
            config=config.policies[name].model_copy(update={"max_context": one.max_context}),
            renderer=one.renderer,
            engine=engine,
            grammars=one.grammars,
        )
        for name, one in loaded.items()
    }
    sharded = (
        _sharded_trainer(config, settings, weights)
        if config.kind == "training" and config.trainer.devices > 1
        else None
    )
    own = _torch_trainer(config, models) if config.kind == "training" and sharded is None else None
    return Parts(engine=engine, trainer=sharded or own, policies=PolicySet.of(config, runtimes), renewable=sharded)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """A model that an engine samples from, and what a session and the engine need of its tokenizer."""

    model: PolicyModel
    renderer: Renderer
    grammars: Grammars
    max_context: int  # tokens


def _load(config: JobConfig, name: str, model: str, settings: EmbeddedEngineConfig, models: LoadedModels) -> _Loaded:
    """Load the model of one policy.

    Args:
        config: the job.
        name: of the policy.
        model: where its weights are.
        settings: of the engine.
        models: of this process.
    """
    import torch

    from palestra.engine.embedded.engine import token_budget
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.grammars.vocabulary import vocabulary_of
    from palestra.models.device import device_of

    policy, dtype = config.policies[name], getattr(torch, settings.dtype)
    device = device_of(settings.device, "engine.device")
    if policy.adapter is not None:
        sampler, tokenizer = models.adapted(model, policy.adapter, None, dtype, device)
    elif config.kind == "training" and not policy.frozen:
        sampler, tokenizer = models.own(model, dtype, device)
    else:
        sampler, tokenizer = models.frozen(model, dtype, device)
    renderer = select_renderer(tokenizer, keep_reasoning=config.rollout.dropped_reasoning == "keep")
    longest = getattr(sampler.config, "max_position_embeddings", policy.max_context)
    if policy.max_context > longest and policy.max_context != DEFAULT_CONTEXT:
        raise ConfigError(f"max_context is {policy.max_context} and {policy.model} has {longest} positions")
    max_context = min(policy.max_context, longest)
    budget = token_budget(sampler, settings)
    if max_context > budget:
        raise ConfigError(
            f"max_context is {max_context} and the keys and values of {budget} tokens fit into the engine's "
            "memory; raise engine.cache_gib, or lower max_context"
        )
    grammars = Grammars(vocabulary_of(tokenizer, sampler.vocab_size))
    return _Loaded(
        model=PolicyModel(model=sampler, stop_ids=frozenset(renderer.stop_ids), grammars=grammars),
        renderer=renderer,
        grammars=grammars,
        max_context=max_context,
    )


def _sharded_trainer(config: JobConfig, settings: EmbeddedEngineConfig, weights: Mapping[str, str]) -> ShardedTrainer:
    from palestra.runtime.rank_memory import check_memory
    from palestra.trainer.sharded.trainer import ShardedTrainer

    check_memory(config, {name: weights.get(name, config.policies[name].model) for name in config.trained_policies})
    return ShardedTrainer(config.trainer, config.checkpoint.keep, settings.dtype, config.deterministic)


def _torch_trainer(config: JobConfig, models: LoadedModels) -> Trainer:
    from palestra.trainer.torch_trainer import TorchTrainer

    return TorchTrainer(config.trainer, config.checkpoint.keep, models, config.deterministic)
