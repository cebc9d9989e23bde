"""Builds the parts of a job from its configuration: engine, trainer, renderer, grammars."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.chat import ByteTokenizer, ChatMLRenderer, Renderer, select_renderer
from palestra.config import DEFAULT_CONTEXT, EmbeddedEngineConfig, FakeEngineConfig, JobConfig
from palestra.errors import ConfigError
from palestra.grammars.pool import Grammars
from palestra.inference.base import Engine
from palestra.trainer.base import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that differ between a real job and one with a fake engine."""

    engine: Engine
    trainer: Trainer | None  # without a policy yet; None: nothing is trained
    renderer: Renderer
    grammars: Grammars  # used by sessions and by the engine
    max_context: int | None = None  # in tokens; None: as configured


def build_parts(config: JobConfig, weights: str | None = None) -> Parts:
    """Build the parts of a job, and load the model to sample from. A trainer loads its own copy when it gets a policy.

    Args:
        config: the job.
        weights: folder to load the model from, instead of the policy's `model`.

    Raises:
        ModelError: weights are missing, or the architecture is not supported.
        ConfigError: `max_context` is more than the model has.
    """
    if isinstance(config.engine, FakeEngineConfig):
        return _fake(config, config.engine)
    return _embedded(config, config.engine, weights)


def _fake(config: JobConfig, settings: FakeEngineConfig) -> Parts:
    """Build a job without a model: neither torch nor transformers is imported."""
    from palestra.inference.fake import FakeEngine, digits_script
    from palestra.trainer.fake import FakeTrainer

    tokenizer = ByteTokenizer()
    script = digits_script(settings.reply_tokens, tokenizer.eos_token_id)
    return Parts(
        engine=FakeEngine(script, settings.delay_seconds),
        trainer=FakeTrainer(config.checkpoint.keep) if config.kind == "training" else None,
        renderer=ChatMLRenderer(tokenizer),
        grammars=Grammars(),
    )


def _embedded(config: JobConfig, settings: EmbeddedEngineConfig, weights: str | None) -> Parts:
    """Build a job whose engine and trainer are in this process, each with weights of its own."""
    import torch

    from palestra.inference.embedded import EmbeddedEngine, token_budget
    from palestra.inference.model_runner import PolicyModel
    from palestra.models.causal_lm import load_causal_lm, load_tokenizer
    from palestra.models.devices import device_of
    from palestra.models.grammar import vocabulary_of
    from palestra.models.memory import tune_malloc

    tune_malloc()
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    policy = config.policy
    model = weights or policy.model
    tokenizer = load_tokenizer(model)
    renderer = select_renderer(tokenizer, keep_reasoning=config.rollout.dropped_reasoning == "keep")
    sampler = load_causal_lm(model, getattr(torch, settings.dtype), device_of(settings.device, "engine.device"))
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
    sampled = PolicyModel(model=sampler, stop_ids=frozenset(renderer.stop_ids), grammars=grammars)
    return Parts(
        engine=EmbeddedEngine({config.policy_name: sampled}, settings, config.deterministic),
        trainer=_torch_trainer(config) if config.kind == "training" else None,
        renderer=renderer,
        grammars=grammars,
        max_context=max_context,
    )


def _torch_trainer(config: JobConfig) -> Trainer:
    from palestra.trainer.torch_trainer import TorchTrainer

    return TorchTrainer(config.trainer, config.checkpoint.keep)
