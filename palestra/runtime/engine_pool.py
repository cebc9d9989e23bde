"""Builds the parts of a job whose engine is a pool of workers: processes on any node, servers, or both."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from palestra.config import EngineConfig, JobConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake.config import FakeEngineConfig
from palestra.engine.pool.manager import InferenceManager
from palestra.engine.pool.options import START_SECONDS, CheckRoom, PoolOptions, StartWorker
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
from palestra.runtime.model_memory import check_more
from palestra.runtime.parts import Parts, build_parts, make_deterministic, parts_with_trainer
from palestra.runtime.places import HERE, JobPlaces
from palestra.session import PolicyRuntime, PolicySet
from palestra.threads import in_thread

PREFIX_TOKENS = 32768  # of each policy whose place is remembered, where the engine does not say what it keeps
_AFTER_START_SECONDS = 60.0  # beside `engine.startup_seconds`, to look whether a server fits

Keep = Callable[[str, WeightSource], Awaitable[KeptWeights]]


async def pooled_parts(
    config: JobConfig,
    settings: EngineConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None = None,
    places: JobPlaces = HERE,
) -> Parts:
    """Start the engine's workers, and build the other parts of a job in this process.

    Args:
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: see `build_parts`; the workers read them in the same folder.

    Raises:
        PalestraError: a worker can't be started; see `build_parts`, and `EngineConfig.require_place`.
    """
    settings.require_place()
    if isinstance(settings, FakeEngineConfig):
        processes = EngineProcesses(config, weights, None, places.engine or start_process)
        engine = await _opened(config, settings, processes.start, _keep_nothing)
        fake = await in_thread(lambda: build_parts(config))
        runtimes = {name: replace(one, engine=engine) for name, one in fake.policies.runtimes.items()}
        return replace(fake, engine=engine, policies=PolicySet.of(config, runtimes))
    if not isinstance(settings, EmbeddedEngineConfig):
        return await _served_parts(config, settings, weights, pictures, places)
    from palestra.runtime.pool_workers import processes_of

    shown = None if pictures is None else pictures.folder
    processes, most = await in_thread(lambda: processes_of(config, settings, weights, shown, places))

    async def check_room(count: int) -> None:
        await in_thread(lambda: check_more(config, weights, count))

    has_bundles = places.engine is not None  # whose memory is their own
    keep = _keep_in(settings, places.folder)
    engine = await _opened(config, settings, processes.start, keep, most, None if has_bundles else check_room)
    try:
        return await in_thread(lambda: _parts(config, weights, engine, processes.models, pictures, places))
    except BaseException:
        await engine.close()
        raise


async def _served_parts(
    config: JobConfig,
    settings: EngineConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None,
    places: JobPlaces,
) -> Parts:
    """Build a job some of whose workers are servers of another project, beside a trainer in this process."""
    from palestra.models.loading import LoadedModels
    from palestra.runtime.pool_workers import workers_of
    from palestra.runtime.served_models import read_served_models, served_runtimes

    models = await in_thread(lambda: read_served_models(config, weights, pictures))
    shown = None if pictures is None else pictures.folder
    workers = await in_thread(lambda: workers_of(config, settings.tables, models, weights, shown, places))
    engine = await _opened(
        config, settings, workers.start, _keep_in(settings, places.folder), workers.most, workers.check_room
    )
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
    config: JobConfig,
    settings: EngineConfig,
    start: StartWorker,
    keep: Keep,
    most: int | None = None,
    check_room: CheckRoom | None = None,
) -> InferenceManager:
    """Return a pool whose workers serve."""
    tables = settings.tables
    options = PoolOptions(
        replicas=settings.worker_count,
        most=most,
        sync=settings.sync,
        stuck_seconds=settings.stuck_seconds,
        prefix_tokens=max(getattr(table, "prefix_cache_tokens", PREFIX_TOKENS) for table in tables),
        start_seconds=max(
            START_SECONDS, *(getattr(table, "startup_seconds", 0.0) + _AFTER_START_SECONDS for table in tables)
        ),
        kinds=tuple(table.kind for table in tables for _ in range(table.worker_count)) if len(tables) > 1 else (),
    )
    pool = InferenceManager(start, list(config.policies), keep, options, check_room)
    await pool.open()
    return pool


def _keep_in(settings: EngineConfig, folder: Path | None) -> Keep:
    """Return a function that keeps weights in the precision in which the workers have them."""
    keeper = WeightKeeper(settings.precision, folder)

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
