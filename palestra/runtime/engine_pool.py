"""Builds the parts of a job whose engine is a pool of workers: processes here or on other nodes, or servers."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from palestra.config import EmbeddedEngineConfig, FakeEngineConfig, JobConfig, SglangEngineConfig, VllmEngineConfig
from palestra.config.engine_pool import PooledEngineConfig
from palestra.engine.pool.manager import InferenceManager, PoolOptions, StartWorker
from palestra.engine.pool.wanted import KeptWeights
from palestra.errors import EngineFailure
from palestra.grammars.pool import Grammars
from palestra.models.kept_weights import KeptSource, WeightKeeper
from palestra.models.saved_weights import SavedWeights
from palestra.models.weights import WeightSource
from palestra.pictures.stored import StoredPictures
from palestra.processes import start_process
from palestra.renderers import select_renderer
from palestra.runtime.engine_process import EngineProcesses, SampledModel
from palestra.runtime.parts import Parts, build_parts, make_deterministic, parts_with_trainer
from palestra.runtime.places import HERE, JobPlaces
from palestra.session import PolicyRuntime, PolicySet
from palestra.threads import in_thread

Keep = Callable[[str, WeightSource], Awaitable[KeptWeights]]


async def pooled_parts(
    config: JobConfig,
    settings: PooledEngineConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None = None,
    places: JobPlaces = HERE,
) -> Parts:
    """Start the engine's workers, and build the other parts of a job in this process.

    Args:
        config: the job.
        settings: of its engine.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: see `build_parts`; the workers read them in the same folder.
        places: where its processes run.

    Raises:
        PalestraError: a worker can't be started; see `build_parts`.
    """
    if isinstance(settings, FakeEngineConfig):
        processes = EngineProcesses(config, weights, None, places.engine or start_process)
        engine = await _opened(config, settings, processes.start, _keep_nothing)
        fake = await in_thread(lambda: build_parts(config))
        runtimes = {name: replace(one, engine=engine) for name, one in fake.policies.runtimes.items()}
        return replace(fake, engine=engine, policies=PolicySet.of(config, runtimes))
    if isinstance(settings, VllmEngineConfig | SglangEngineConfig):
        return await _served_parts(config, settings, weights, pictures, places)
    assert isinstance(settings, EmbeddedEngineConfig)
    # A worker that has room of its own looks itself how many cores and how much memory that is.
    shared = settings if places.engine else await in_thread(lambda: _share(settings))
    ordered, shown = config.model_copy(update={"engine": shared}), None if pictures is None else pictures.folder
    processes = EngineProcesses(ordered, weights, shown, places.engine or start_process)
    engine = await _opened(config, shared, processes.start, _keep_in(shared, places.folder))
    try:
        return await in_thread(lambda: _parts(config, weights, engine, processes.models, pictures, places))
    except BaseException:
        await engine.close()
        raise


async def _served_parts(
    config: JobConfig,
    settings: VllmEngineConfig | SglangEngineConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None,
    places: JobPlaces,
) -> Parts:
    """Build a job whose workers are servers of another project, beside a trainer in this process."""
    from palestra.models.loading import LoadedModels
    from palestra.runtime.served_models import read_served_models, served_runtimes
    from palestra.runtime.served_pool import ServerWorkers

    models = await in_thread(lambda: read_served_models(config, weights, pictures))
    workers = await in_thread(lambda: ServerWorkers(config, settings, models))
    engine = await _opened(config, settings, workers.start, _keep_in(settings, places.folder), workers.most)
    try:
        runtimes = await in_thread(lambda: served_runtimes(config, models, engine))
        return await in_thread(
            lambda: parts_with_trainer(
                config, engine, runtimes, LoadedModels(pictures=pictures), weights, pictures, places
            )
        )
    except BaseException:
        await engine.close()
        raise


async def _opened(
    config: JobConfig, settings: PooledEngineConfig, start: StartWorker, keep: Keep, most: int | None = None
) -> InferenceManager:
    """Return a pool whose workers serve."""
    options = PoolOptions(
        replicas=settings.workers,
        most=most,
        sync=settings.sync,
        stuck_seconds=settings.stuck_seconds,
        prefix_tokens=settings.prefix_cache_tokens if isinstance(settings, EmbeddedEngineConfig) else 32768,
    )
    pool = InferenceManager(start, list(config.policies), keep, options)
    await pool.open()
    return pool


def _share(settings: EmbeddedEngineConfig) -> EmbeddedEngineConfig:
    """Return what each worker has of the machine: its part of the cores, and of the memory for keys and values."""
    from palestra.models.device import available_cores, device_of, memory_bytes

    cache = settings.cache_gib
    if cache is None and device_of(settings.device, "engine.device").type == "cpu":
        cache = memory_bytes() / 4 / settings.replicas / 2**30
    threads = settings.threads or max(available_cores() // settings.replicas, 1)
    return settings.model_copy(update={"threads": threads, "cache_gib": cache})


def _keep_in(settings: EmbeddedEngineConfig | VllmEngineConfig | SglangEngineConfig, folder: Path | None) -> Keep:
    """Return a function that keeps weights in the precision in which the workers have them.

    Args:
        settings: of the engine.
        folder: that all machines of the job see; None: the workers are on this one.
    """
    keeper = WeightKeeper(settings.dtype, folder)

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
    config: JobConfig,
    weights: Mapping[str, str],
    engine: InferenceManager,
    models: Mapping[str, SampledModel],
    pictures: StoredPictures | None,
    places: JobPlaces,
) -> Parts:
    """Build what is in the job's own process: renderers, grammars and the trainer, and no model to sample from."""
    from palestra.grammars.vocabulary import vocabulary_of
    from palestra.models.causal_lm import load_tokenizer
    from palestra.models.loading import LoadedModels, picture_tokens

    make_deterministic(config)
    runtimes = {}
    for name, policy in config.policies.items():
        model = weights.get(name, policy.model)
        tokenizer = load_tokenizer(model)
        shown = None if pictures is None else picture_tokens(model, tokenizer, pictures)
        runtimes[name] = PolicyRuntime(
            name=name,
            config=policy.model_copy(update={"max_context": models[name].max_context}),
            renderer=select_renderer(tokenizer, config.rollout.dropped_reasoning == "keep", shown),
            engine=engine,
            grammars=Grammars(vocabulary_of(tokenizer, models[name].vocab_size)),
        )
    return parts_with_trainer(config, engine, runtimes, LoadedModels(pictures=pictures), weights, pictures, places)
