"""What is wrong with the trainer and the servers of a job, found before anything is loaded or started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from palestra.config import FakeEngineConfig, JobConfig, VllmEngineConfig
from palestra.config.engine_pool import PooledEngineConfig
from palestra.errors import ConfigError, PalestraError
from palestra.models.device import device_of
from palestra.runtime.places import JobPlaces

CONNECT_SECONDS = 3.0


def check_trainer(config: JobConfig, places: JobPlaces) -> None:
    """Refuse a trainer that this machine has no device for.

    Args:
        config: the job.
        places: where its processes run; ranks with bundles of their own look at their machines themselves.

    Raises:
        ConfigError: there is no such device, or weights are to be kept in the memory in which they are anyway.
    """
    has_model = not isinstance(config.engine, FakeEngineConfig) and config.base is None
    if config.kind != "training" or not has_model or places.trainer is not None:
        return
    device = device_of(config.trainer.device, "trainer.device")
    if config.trainer.cpu_offload:
        from palestra.trainer.sharded.rank import check_offload

        check_offload(config.trainer, device)


def impossible_servers(config: JobConfig, key: str, table: PooledEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield what makes the servers of a table of workers impossible: the key to change, and a sentence.

    Args:
        config: the job.
        key: of the table, such as `engine`.
        table: of the workers.
    """
    for url in getattr(table, "url", None) or ():
        if (problem := _unreachable(url)) is not None:
            yield f"{key}.url", f"nothing answers at {url} ({problem}); start the server first, or correct {key}.url"
    if not isinstance(table, VllmEngineConfig):
        return
    from palestra.runtime.engine_servers import weight_rounds

    try:
        weight_rounds(table)
    except ConfigError as error:
        yield f"{key}.{'weight_transfer' if table.weights_address is None else 'weights_address'}", str(error)
    yield from _without_room(config, key, table)


def _without_room(config: JobConfig, key: str, table: VllmEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield why the servers that a table starts have no room on this machine; nothing where that can't be known."""
    from palestra.runtime.served_models import read_served_models
    from palestra.runtime.server_places import ServerPlaces

    if table.python is None:
        return
    try:
        models = read_served_models(config, {})
    except PalestraError:  # a model, or a key of a policy, that other checks name
        return
    try:
        ServerPlaces(config, table, table.python, models).check_memory(range(table.worker_count))
    except ConfigError as error:
        yield f"{key}.{'replicas' if table.worker_count > 1 else 'cache_gib'}", str(error)


def _unreachable(url: str) -> str | None:
    """Return why no connection to a server is taken; None: one is."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None
