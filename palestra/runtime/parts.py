"""Builds the parts of a job from its configuration: engine, trainer, policies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from palestra.config import JobConfig, PooledEngineConfig
from palestra.engine.base import Engine
from palestra.engine.driver import EngineJob, SampledPolicy, Workers, driver_of
from palestra.engine.pool.manager import InferenceManager
from palestra.engine.pool.options import PoolOptions
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import ConfigError
from palestra.extensions import sole_extension
from palestra.models.device import make_deterministic
from palestra.pictures.blobs import StoredPictures
from palestra.runtime.engine_process import ProcessHost
from palestra.runtime.model_memory import check_more
from palestra.runtime.renewal import Renewable
from palestra.runtime.terms import HERE, JobPlaces
from palestra.session import PolicyRuntime, PolicySet
from palestra.threads import in_thread
from palestra.trainer.base import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a job that depend on its engine: engine, trainer, and policies."""

    engine: Engine
    trainer: Trainer | None  # without a policy yet; None: nothing is trained
    policies: PolicySet
    renewable: Renewable | None = None  # the trainer, where its processes may be lost
    pool: InferenceManager | None = None  # the engine, where it has workers


class BaseConnection(Renewable, Protocol):
    """A job's connection to the base server with its engine and trainer."""

    numerics: dict[str, str]


def base_connector() -> Callable[[JobConfig, Mapping[str, str]], Awaitable[tuple[Parts, BaseConnection]]]:
    """Return the function that connects a job to its base server: (configuration, model folders by policy) -> parts."""
    missing = "a policy has `base`, and no package that connects to base servers is installed"
    connect: Callable[[JobConfig, Mapping[str, str]], Awaitable[tuple[Parts, BaseConnection]]]
    connect = sole_extension("palestra.base_servers", missing)
    return connect


class RenewableTrainer(Trainer, Renewable, Protocol):
    """A trainer whose processes may be lost."""


def trainer_maker() -> Callable[[EngineJob, JobPlaces], RenewableTrainer]:
    """Return the function that makes the trainer of a job with several devices."""
    missing = "trainer.devices is above 1, and no package that trains over several devices is installed"
    make: Callable[[EngineJob, JobPlaces], RenewableTrainer] = sole_extension("palestra.trainers", missing)
    return make


def build_parts(
    config: JobConfig,
    weights: Mapping[str, str] | None = None,
    pictures: StoredPictures | None = None,
    places: JobPlaces = HERE,
) -> Parts:
    """Build the parts of a job whose engine is in this process, and load the sampled models.

    The trainer loads its own copies. `pooled_parts` is for engines with workers.

    Args:
        weights: folders that replace the policies' `model`, by policy.
        pictures: source of the prompts' pictures; None: vision-language models get none.
    """
    if len(config.engine.tables) > 1:
        raise ConfigError(
            "engine.workers are of several kinds, and one engine is needed here: take one kind, such as engine.kind = "
            "'embedded', and leave engine.workers out"
        )
    job = EngineJob(config=config, weights=weights or {}, pictures=pictures)
    (table,) = config.engine.tables
    loaded = driver_of(table).load(job, table)
    return _with_trainer(job, loaded.engine, loaded.policies, places)


async def pooled_parts(
    config: JobConfig,
    weights: Mapping[str, str],
    pictures: StoredPictures | None = None,
    places: JobPlaces = HERE,
) -> Parts:
    """Start the engine's workers, and build the other parts of a job in this process. `weights`: folders that replace
    the policies' `model`, by policy.
    """
    config.engine.require_place()
    job = EngineJob(config=config, weights=weights, pictures=pictures, trainer_is_here=places.trainer is None)
    host = ProcessHost(places.engine)
    workers = await in_thread(lambda: workers_of(job, host))
    engine = await _opened(job, workers, host, places)
    try:
        parts = await in_thread(lambda: _with_trainer(job, engine, workers.policies(), places))
        return replace(parts, pool=engine)
    except BaseException:
        await engine.close()
        raise


def workers_of(job: EngineJob, host: ProcessHost) -> Workers:
    """Return what starts the workers of a job, of one kind or several. Blocks briefly."""
    tables, policies = job.config.engine.tables, len(job.config.policies)
    if not host.in_bundles:
        _check_cards(tables)
    counts = [driver_of(table).process_count(table, policies) for table in tables]
    kinds = [
        driver_of(table).workers(job, table, host, 0 if host.in_bundles else sum(counts) - count)
        for table, count in zip(tables, counts, strict=True)
    ]
    return kinds[0] if len(kinds) == 1 else _mixed(kinds)


def _mixed(kinds: Sequence[Workers]) -> Workers:
    """Return what starts the workers of all kinds, numbered kind by kind."""
    numbered = [(workers, number) for workers in kinds for number in range(workers.count)]

    async def start(number: int) -> StartedWorker:
        workers, own = numbered[number]
        return await workers.start(own)

    return Workers(
        start=start,
        count=len(numbered),
        most=len(numbered),
        policies=kinds[0].policies,
        start_seconds=max(workers.start_seconds for workers in kinds),
    )


def _check_cards(tables: Sequence[PooledEngineConfig]) -> None:
    """Refuse workers of several kinds that would use the same graphics cards of this machine."""
    if len(tables) > 1:
        started = [table for table in tables if table.started_count]
        if len(on_cards := [table.kind for table in started if driver_of(table).uses_cards(table)]) > 1:
            raise ConfigError(
                f"engine.workers start {' and '.join(on_cards)} workers, which would use the same GPUs of this "
                "machine; set device = 'cpu' for the embedded ones, or let a service place them (docs/how-to/nodes.md)"
            )


async def _opened(job: EngineJob, workers: Workers, host: ProcessHost, places: JobPlaces) -> InferenceManager:
    """Return a pool whose workers serve."""
    settings, tables = job.config.engine, job.config.engine.tables
    options = PoolOptions(
        replicas=workers.count,
        most=workers.most,
        sync="all" if settings.broadcasts else "rolling",
        stuck_seconds=settings.stuck_seconds,
        start_seconds=workers.start_seconds,
        kinds=tuple(table.kind for table in tables for _ in range(table.worker_count)) if len(tables) > 1 else (),
    )

    async def check_capacity(count: int) -> None:
        if workers.check_capacity is not None:
            await workers.check_capacity(count)
        elif not host.in_bundles:  # whose memory is their own
            await in_thread(lambda: check_more(job.config, job.weights, count))

    keep = driver_of(tables[0]).keeper(tables[0], places.folder)  # all have the same precision
    pool = InferenceManager(workers.start, list(job.config.policies), keep, options, check_capacity)
    await pool.open()
    return pool


def _with_trainer(job: EngineJob, engine: Engine, sampled: Mapping[str, SampledPolicy], places: JobPlaces) -> Parts:
    """Return the parts of a job, with a trainer without policies if the job trains."""
    config = job.config
    runtimes = {
        name: PolicyRuntime(
            name=name,
            config=config.policies[name].model_copy(update={"max_context": one.max_context}),
            renderer=one.renderer,
            engine=engine,
            grammars=one.grammars,
        )
        for name, one in sampled.items()
    }
    trainer, renewable = _trainer(job, places)
    return Parts(engine=engine, trainer=trainer, policies=PolicySet.of(config, runtimes), renewable=renewable)


def _trainer(job: EngineJob, places: JobPlaces) -> tuple[Trainer | None, Renewable | None]:
    """Return a trainer without policies, and the same object if its processes may be lost; None: nothing is trained."""
    config, keep = job.config, job.config.checkpoint.keep
    if config.kind != "training":
        return None, None
    if not config.engine.has_model:
        from palestra.trainer.fake import FakeTrainer

        return FakeTrainer(keep), None
    make_deterministic(config.deterministic)
    if config.trainer.devices == 1:
        from palestra.trainer.torch_trainer import TorchTrainer

        return TorchTrainer(config.trainer, keep, job.models, config.deterministic), None
    sharded = trainer_maker()(job, places)
    return sharded, sharded
