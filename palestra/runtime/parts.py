"""Builds the parts of a job from its configuration: engine, trainer, policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.config import DEFAULT_CONTEXT, JobConfig, MixedEngineConfig
from palestra.engine.base import Engine
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake.config import FakeEngineConfig
from palestra.errors import ConfigError
from palestra.grammars.pool import Grammars
from palestra.pictures.stored import StoredPictures
from palestra.processes import start_process
from palestra.renderers import ByteTokenizer, ChatMLRenderer, PictureTokens, Renderer, select_renderer
from palestra.runtime.places import HERE, JobPlaces
from palestra.session import PolicyRuntime, PolicySet
from palestra.trainer.base import Trainer

if TYPE_CHECKING:
    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.loading import LoadedModels
    from palestra.runtime.renewal import Renewable


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that differ between a real job and one with a fake engine: what samples, what trains, the policies."""

    engine: Engine
    trainer: Trainer | None  # without a policy yet; None: nothing is trained
    policies: PolicySet
    renewable: Renewable | None = None  # the trainer, where its processes may be lost


def build_parts(
    config: JobConfig,
    weights: Mapping[str, str] | None = None,
    pictures: StoredPictures | None = None,
    places: JobPlaces = HERE,
) -> Parts:
    """Build the parts of a job whose engine is in this process, and load the models to sample from.

    A trainer loads its own copy of one that it gets. `pooled_parts` builds the parts of a job whose engine has workers.

    Args:
        weights: folders to load models from, instead of the policies' `model`, by the policy's name. None: none.
        pictures: where the pictures of prompts are found; None: models that see are not shown any.
        places: where the ranks of its trainer run.

    Raises:
        ModelError: weights are missing, or the architecture is not supported.
        ConfigError: a `max_context` is more than its model has, or the engine is a pool of several kinds.
    """
    if isinstance(config.engine, FakeEngineConfig):
        return _fake(config, config.engine)
    if isinstance(config.engine, MixedEngineConfig):
        raise ConfigError(
            "engine.workers are of several kinds, and one engine is needed here: take one kind, such as engine.kind = "
            "'embedded', and leave engine.workers out"
        )
    assert isinstance(config.engine, EmbeddedEngineConfig)
    return _embedded(config, config.engine, weights or {}, pictures, places)


def _fake(config: JobConfig, settings: FakeEngineConfig) -> Parts:
    """Build a job without a model: neither torch nor transformers is imported."""
    from palestra.trainer.fake import FakeTrainer

    tokenizer, engine = ByteTokenizer(), fake_engine(settings)
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


def fake_engine(settings: FakeEngineConfig) -> Engine:
    """Return an engine without a model."""
    from palestra.engine.fake.engine import FakeEngine, digits_script

    return FakeEngine(digits_script(settings.reply_tokens, ByteTokenizer().eos_token_id), settings.delay_seconds)


def _embedded(
    config: JobConfig,
    settings: EmbeddedEngineConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None,
    places: JobPlaces,
) -> Parts:
    """Build a job whose engine and trainer are in this process, and share weights that never change."""
    from palestra.models.loading import LoadedModels

    models = LoadedModels(pictures=pictures)
    engine, loaded = load_engine(config, settings, weights, models)
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
    return parts_with_trainer(config, engine, runtimes, models, weights, pictures, places)


def load_engine(
    config: JobConfig, settings: EmbeddedEngineConfig, weights: Mapping[str, str], models: LoadedModels
) -> tuple[EmbeddedEngine, dict[str, LoadedPolicy]]:
    """Load the models that a job samples from, and make an engine of them.

    Args:
        weights: see `build_parts`.
    """
    from palestra.engine.embedded.engine import EmbeddedEngine

    make_deterministic(config)
    loaded = {
        name: _load(config, name, weights.get(name, policy.model), settings, models)
        for name, policy in config.policies.items()
    }
    return EmbeddedEngine({name: one.model for name, one in loaded.items()}, settings, config.deterministic), loaded


def make_deterministic(config: JobConfig) -> None:
    """Have this process compute reproducibly if the job is deterministic; before its first product."""
    import torch

    from palestra.models.device import reproducible_products

    if config.deterministic:
        reproducible_products()
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPolicy:
    """A model that an engine samples from, and what a session and the engine need of its tokenizer."""

    model: PolicyModel
    renderer: Renderer
    grammars: Grammars
    max_context: int  # tokens


def _load(
    config: JobConfig, name: str, model: str, settings: EmbeddedEngineConfig, models: LoadedModels
) -> LoadedPolicy:
    """Load the model of one policy."""
    from palestra.engine.embedded.engine import token_budget
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.grammars.vocabulary import vocabulary_of
    from palestra.models.device import device_of, precision_of

    policy, device = config.policies[name], device_of(settings.device, "engine.device")
    dtype = precision_of(settings.dtype, device)
    if policy.adapter is not None:
        sampler, tokenizer = models.adapted(model, policy.adapter, None, dtype, device)
    elif config.kind == "training" and not policy.frozen:
        sampler, tokenizer = models.own(model, dtype, device, policy.vision)
    else:
        sampler, tokenizer = models.frozen(model, dtype, device)
    shown = None
    if sampler.vision is not None and sampler.vision.pictures is not None:
        shown = PictureTokens(tokenizer, sampler.vision.layout, sampler.vision.pictures)
    renderer = select_renderer(tokenizer, config.rollout.dropped_reasoning == "keep", shown)
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
    return LoadedPolicy(
        model=PolicyModel(model=sampler, stop_ids=frozenset(renderer.stop_ids), grammars=grammars),
        renderer=renderer,
        grammars=grammars,
        max_context=max_context,
    )


def parts_with_trainer(
    config: JobConfig,
    engine: Engine,
    runtimes: Mapping[str, PolicyRuntime],
    models: LoadedModels,
    weights: Mapping[str, str],
    pictures: StoredPictures | None,
    places: JobPlaces = HERE,
) -> Parts:
    """Return the parts of a job with a trainer that has no policy yet, or with none if nothing is trained.

    Args:
        models: of this process, with which a trainer in it shares weights that never change.
        weights: see `build_parts`.
        pictures: see `build_parts`.
        places: where the ranks of a trainer run.
    """
    policies = PolicySet.of(config, runtimes)
    if config.kind != "training":
        return Parts(engine=engine, trainer=None, policies=policies)
    if config.trainer.devices == 1:
        from palestra.trainer.torch_trainer import TorchTrainer

        own = TorchTrainer(config.trainer, config.checkpoint.keep, models, config.deterministic)
        return Parts(engine=engine, trainer=own, policies=policies)
    from palestra.trainer.sharded.processes import RankPlaces
    from palestra.trainer.sharded.trainer import ShardedTrainer

    assert not isinstance(config.engine, FakeEngineConfig)
    folder = None if pictures is None else pictures.folder
    ranks = RankPlaces(start=places.trainer or start_process, folder=places.trainer and places.folder)
    keep, dtype = config.checkpoint.keep, config.engine.precision
    sharded = ShardedTrainer(config.trainer, keep, dtype, config.deterministic, ranks, folder)
    return Parts(engine=engine, trainer=sharded, policies=policies, renewable=sharded)
