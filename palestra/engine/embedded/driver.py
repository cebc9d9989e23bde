"""The driver of `kind = "embedded"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from palestra.config import DEFAULT_CONTEXT, JobConfig
from palestra.engine.cards import Card, CardShare, CardTurns, deal_cards, trainer_cards, visible_cards
from palestra.engine.driver import Computes, EngineDriver, EngineJob, LoadedEngine, SampledPolicy, WorkerHost, Workers
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import ConfigError

if TYPE_CHECKING:
    from palestra.engine.embedded.model_runner import PolicyModel

GIB = 2**30


class EmbeddedDriver(EngineDriver[EmbeddedEngineConfig]):
    """transformers models, in the job's own process or in workers."""

    section = EmbeddedEngineConfig

    def computes(self, table: EmbeddedEngineConfig) -> Computes:
        """Return how each worker computes; see `EngineDriver`."""
        return Computes(table.device, table.dtype, table.threads, table.cache_gib)

    def load(self, job: EngineJob, table: EmbeddedEngineConfig) -> LoadedEngine:
        """Load the models of all policies, and return an engine of this process; see `EngineDriver`."""
        from palestra.engine.embedded.engine import EmbeddedEngine
        from palestra.models.device import make_deterministic

        make_deterministic(job.config.deterministic)
        loaded = {name: _loaded(job, name, table) for name in job.config.policies}
        engine = EmbeddedEngine(
            {name: model for name, (model, _) in loaded.items()},
            table,
            job.config.deterministic,
            finish=job.config.rollout.weight_sync != "any_time",
        )
        return LoadedEngine(engine, {name: policy for name, (_, policy) in loaded.items()})

    def workers(self, job: EngineJob, table: EmbeddedEngineConfig, host: WorkerHost, others: int = 0) -> Workers:
        """Return what starts processes that share this machine, or have a bundle each; see `EngineDriver`."""
        if host.in_bundles:  # a worker looks itself how much its bundle has
            processes, most = host.processes(job.with_engine(table.model_copy(update={"replicas": 1}))), None
        else:
            cards = worker_cards(job.config, table, trainer_is_here=job.trainer_is_here)
            ordered = job.with_engine(worker_settings(table, cards, others))
            # Workers that share a GPU divide its memory when the job starts, so that none can be added to them.
            processes, most = host.processes(ordered, CardTurns(cards)), len(cards) or None
        return Workers(
            start=processes.start,
            count=table.worker_count,
            most=most,
            policies=lambda: self.policies(job, processes.models),
        )


def _loaded(job: EngineJob, name: str, table: EmbeddedEngineConfig) -> tuple[PolicyModel, SampledPolicy]:
    """Load the model of one policy."""
    from palestra.engine.embedded.engine import token_budget
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.grammars.matcher import vocabulary_of
    from palestra.grammars.pool import Grammars
    from palestra.models.device import device_of, precision_of
    from palestra.renderers import PictureTokens, select_renderer

    config, model, models = job.config, job.model_of(name), job.models
    policy, device = config.policies[name], device_of(table.device, "engine.device")
    dtype = precision_of(table.dtype, device)
    if policy.adapter is not None:
        sampler, tokenizer = models.adapted(model, policy.adapter, None, dtype, device)
    elif config.kind == "training" and not policy.frozen:
        sampler, tokenizer = models.own(model, dtype, device, policy.vision)
    else:
        sampler, tokenizer = models.frozen(model, dtype, device)
    shown = None
    if sampler.vision is not None and sampler.vision.pictures is not None:
        shown = PictureTokens(tokenizer, sampler.vision.layout, sampler.vision.pictures)
    renderer = select_renderer(tokenizer, config.rollout.changed_history == "keep", shown)
    longest = getattr(sampler.config, "max_position_embeddings", policy.max_context)
    if policy.max_context > longest and policy.max_context != DEFAULT_CONTEXT:
        raise ConfigError(f"max_context is {policy.max_context} and {policy.model} has {longest} positions")
    max_context = min(policy.max_context, longest)
    budget = token_budget(sampler, table)
    if max_context > budget:
        raise ConfigError(
            f"max_context is {max_context} and the keys and values of {budget} tokens fit into the engine's "
            "memory; raise engine.cache_gib, or lower max_context"
        )
    grammars = Grammars(vocabulary_of(tokenizer, sampler.vocab_size))
    return PolicyModel(model=sampler, stop_ids=frozenset(renderer.stop_ids), grammars=grammars), SampledPolicy(
        renderer=renderer, grammars=grammars, vocab_size=sampler.vocab_size, max_context=max_context
    )


def worker_cards(
    config: JobConfig,
    settings: EmbeddedEngineConfig,
    look: Callable[[], list[Card]] = visible_cards,
    *,
    trainer_is_here: bool = True,
) -> list[CardShare]:
    """Return the GPUs of each possible worker; empty: the workers compute on CPUs. `look` returns the GPUs that the job
    may use; `trainer_is_here`: the trainer shares them, see `trainer_cards`.
    """
    from palestra.models.device import device_of

    if device_of(settings.device, "engine.device").type == "cpu":
        return []
    cards, trainer = look(), trainer_cards(config, trainer_is_here)
    return deal_cards(cards, max(settings.replicas, len(cards) - trainer), 1, trainer)


def worker_settings(
    settings: EmbeddedEngineConfig, cards: Sequence[CardShare], others: int = 0
) -> EmbeddedEngineConfig:
    """Return each worker's settings, with its part of the cores and of the key-value memory. `others` counts other
    engine processes that compute on this machine.
    """
    from palestra.models.device import available_cores, memory_bytes

    cache, processes = settings.cache_gib, settings.replicas + others
    if cache is None and not cards:
        cache = memory_bytes() / 4 / processes / GIB
    elif cache is None and (sharers := max(one.sharers for one in cards)) > 1:
        # Half of what is free, as one worker would take. Several find the same memory free, because they load together.
        free = [card.free_bytes for one in cards for card in one.cards if card.free_bytes is not None]
        cache = min(free) / 2 / sharers / GIB if free else None
    threads = settings.threads or max(available_cores() // processes, 1)
    return settings.model_copy(update={"threads": threads, "cache_gib": cache})
