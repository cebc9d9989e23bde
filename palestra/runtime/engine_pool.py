"""Builds the parts of a job whose engine is a pool of worker processes (`engine.replicas`)."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from palestra.config import EmbeddedEngineConfig, FakeEngineConfig, JobConfig
from palestra.config.engine import PooledEngineConfig
from palestra.engine.pool.manager import InferenceManager, PoolOptions
from palestra.engine.pool.wanted import KeptWeights
from palestra.errors import EngineFailure
from palestra.grammars.pool import Grammars
from palestra.models.kept_weights import KeptSource, WeightKeeper
from palestra.models.saved_weights import SavedWeights
from palestra.models.weights import WeightSource
from palestra.renderers import select_renderer
from palestra.runtime.engine_process import EngineProcesses, SampledModel
from palestra.runtime.parts import Parts, build_parts, make_deterministic, parts_with_trainer
from palestra.session import PolicyRuntime, PolicySet
from palestra.threads import in_thread

Keep = Callable[[str, WeightSource], Awaitable[KeptWeights]]


async def pooled_parts(config: JobConfig, settings: PooledEngineConfig, weights: Mapping[str, str]) -> Parts:
    """Start the engine's workers, and build the other parts of a job in this process.

    Args:
        config: the job.
        settings: of its engine, with at least two replicas.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.

    Raises:
        PalestraError: a worker can't be started; see `build_parts`.
    """
    if isinstance(settings, FakeEngineConfig):
        engine, _ = await _opened(config, settings, weights, _keep_nothing)
        fake = await in_thread(lambda: build_parts(config))
        runtimes = {name: replace(one, engine=engine) for name, one in fake.policies.runtimes.items()}
        return replace(fake, engine=engine, policies=PolicySet.of(config, runtimes))
    assert isinstance(settings, EmbeddedEngineConfig)
    shared = await in_thread(lambda: _share(settings))
    engine, models = await _opened(config.model_copy(update={"engine": shared}), shared, weights, _keep_in(shared))
    try:
        return await in_thread(lambda: _parts(config, weights, engine, models))
    except BaseException:
        await engine.close()
        raise


async def _opened(
    config: JobConfig, settings: PooledEngineConfig, weights: Mapping[str, str], keep: Keep
) -> tuple[InferenceManager, Mapping[str, SampledModel]]:
    """Return a pool whose workers serve, and the models that they have."""
    processes = EngineProcesses(config, weights)
    options = PoolOptions(
        replicas=settings.replicas,
        sync=settings.sync,
        stuck_seconds=settings.stuck_seconds,
        prefix_tokens=settings.prefix_cache_tokens if isinstance(settings, EmbeddedEngineConfig) else 32768,
    )
    pool = InferenceManager(processes.start, list(config.policies), keep, options)
    await pool.open()
    return pool, processes.models


def _share(settings: EmbeddedEngineConfig) -> EmbeddedEngineConfig:
    """Return what each worker has of the machine: its part of the cores, and of the memory for keys and values."""
    from palestra.models.device import device_of, memory_bytes

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cache = settings.cache_gib
    if cache is None and device_of(settings.device, "engine.device").type == "cpu":
        cache = memory_bytes() / 4 / settings.replicas / 2**30
    threads = settings.threads or max(cores // settings.replicas, 1)
    return settings.model_copy(update={"threads": threads, "cache_gib": cache})


def _keep_in(settings: EmbeddedEngineConfig) -> Keep:
    """Return a function that keeps weights in the precision in which the workers have them."""
    keeper = WeightKeeper(settings.dtype)

    async def keep(policy: str, source: WeightSource) -> KeptWeights:
        try:
            return await in_thread(lambda: keeper.keep(source))
        except OSError as error:
            raise EngineFailure(
                f"the weights of {policy} can't be written for the engine's workers: {error}"
            ) from error

    return keep


async def _keep_nothing(policy: str, source: WeightSource) -> KeptWeights:
    """Keep weights that no worker reads, because an engine without a model has none."""
    return KeptSource(SavedWeights(Path(os.devnull)))


def _parts(
    config: JobConfig, weights: Mapping[str, str], engine: InferenceManager, models: Mapping[str, SampledModel]
) -> Parts:
    """Build what is in the job's own process: renderers, grammars and the trainer, and no model to sample from."""
    from palestra.grammars.vocabulary import vocabulary_of
    from palestra.models.causal_lm import load_tokenizer
    from palestra.models.loading import LoadedModels

    make_deterministic(config)
    runtimes = {}
    for name, policy in config.policies.items():
        tokenizer = load_tokenizer(weights.get(name, policy.model))
        runtimes[name] = PolicyRuntime(
            name=name,
            config=policy.model_copy(update={"max_context": models[name].max_context}),
            renderer=select_renderer(tokenizer, keep_reasoning=config.rollout.dropped_reasoning == "keep"),
            engine=engine,
            grammars=Grammars(vocabulary_of(tokenizer, models[name].vocab_size)),
        )
    return parts_with_trainer(config, engine, runtimes, LoadedModels(), weights)
