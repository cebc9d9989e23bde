"""Engines that are servers of other projects: starts the servers or finds them, one for each policy."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palestra.config import JobConfig
from palestra.engine.external.api import EngineApi
from palestra.engine.external.connection import Address, EngineConnection
from palestra.engine.external.engine import ExternalEngine
from palestra.engine.external.process import ServerProcess
from palestra.engine.external.sample_text import tokenized
from palestra.engine.external.served_adapter import ServedAdapter
from palestra.engine.external.served_policy import ServedPolicy
from palestra.engine.sglang.api import SglangApi
from palestra.engine.sglang.config import SglangEngineConfig
from palestra.engine.vllm.api import VllmApi
from palestra.engine.vllm.command import OnCards, OnCores, cpu_cache_gib, vllm_command, vllm_variables
from palestra.engine.vllm.config import VllmEngineConfig
from palestra.engine.vllm.rendezvous import Rendezvous
from palestra.engine.vllm.served_broadcast import ServedBroadcast
from palestra.engine.vllm.weight_rounds import WeightRounds
from palestra.errors import ConfigError, EngineFailure, PalestraError
from palestra.models.weight_file import weight_folder
from palestra.runtime.served_models import ServedModel
from palestra.types.calls import PolicyVersion

INSPECT_SECONDS = 20.0  # for a server to say what it is


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
    """The servers of one inference worker, one for each policy."""

    def __init__(
        self,
        config: JobConfig,
        settings: VllmEngineConfig | SglangEngineConfig,
        models: Sequence[ServedModel],
        worker: int,
        places: Sequence[OnCores | OnCards] | None,
        rounds: WeightRounds | None,
    ) -> None:
        """Start the servers, or find them; `engine` waits until they are ready.

        Args:
            worker: number of the worker among those of the job, from 0.
            places: what the servers of the policies compute with, which are started; None: they run already.
            rounds: in which the servers of all workers receive whole weights; None: they read them from files.

        Raises:
            ConfigError: a server can't be found or started: its key is not there, say.
            EngineFailure: its process can't be started.
        """
        self._settings, self._rounds = settings, rounds
        self._places: list[_Place] = []
        try:
            if places is not None:
                assert isinstance(settings, VllmEngineConfig)
                for each, place in zip(models, places, strict=True):
                    self._places.append(_started(config, settings, each, worker, place))
            else:
                self._places = [_found(settings, each, worker) for each in models]
        except BaseException:
            self.stop()
            raise

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
        return ExternalEngine(served, finish, self._settings.stuck_seconds)

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


def _started(
    config: JobConfig, settings: VllmEngineConfig, model: ServedModel, worker: int, place: OnCores | OnCards
) -> _Place:
    """Start a vLLM server of a policy; `EngineServers.engine` waits for it."""
    private = Path(tempfile.mkdtemp(prefix="palestra-", dir="/tmp"))  # short: a socket's path is limited
    weights = _weights_folder(None)
    address = Address(url="http://engine", socket=private / "http", key=secrets.token_urlsafe(24))
    command = vllm_command(settings, model.files.folder, model.bounds.max_context, address, place, model.adapter)
    variables = vllm_variables(settings, address, private, place)
    log = config.folder / f"engine-{model.name}-{worker}.log"
    process = ServerProcess("vLLM", command, variables, log.absolute(), (private, weights))
    cache = cpu_cache_gib(settings) if isinstance(place, OnCores) else settings.cache_gib or 0
    return _Place(model=model, address=address, folder=weights, process=process, kv_bytes=cache * 2**30)


def _found(settings: VllmEngineConfig | SglangEngineConfig, model: ServedModel, worker: int) -> _Place:
    """Return the server of a policy that runs already."""
    assert settings.url is not None
    address = Address(url=settings.url[worker], key=_key(settings))
    return _Place(model=model, address=address, folder=_weights_folder(settings.weights_dir), process=None, kv_bytes=0)


def _key(settings: VllmEngineConfig | SglangEngineConfig) -> str:
    """Return the key of servers that run already; "": they need none."""
    variable = settings.key_variable
    if variable is None:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"engine.key_variable is {variable!r}, and that variable is not set here")
    if not (key.isascii() and key.isprintable()) or key != key.strip():  # which no header of HTTP can have
        raise ConfigError(
            f"engine.key_variable is {variable!r}, and what that variable has can't be a key: it has a letter beyond "
            "ASCII, or a line break or a space around it"
        )
    return key


def weight_rounds(settings: VllmEngineConfig | SglangEngineConfig) -> WeightRounds | None:
    """Return in which rounds weights are broadcast to the servers of an engine; None: they are sent as files.

    Raises:
        ConfigError: this process can't broadcast: nothing can listen at `weights_address`, say.
    """
    if isinstance(settings, SglangEngineConfig) or settings.weight_transfer == "file":
        return None
    # A few such waits in a row must not make the pool think that a worker is stuck, which waits for another one.
    seconds = settings.stuck_seconds / 5
    return WeightRounds(Rendezvous(settings.weights_address, settings.weight_transfer, seconds))


async def inspect_servers(
    settings: VllmEngineConfig | SglangEngineConfig, model: ServedModel, rounds: WeightRounds | None
) -> list[PalestraError]:
    """Return why servers that run already can't serve a policy, in the order of their addresses; none: all fit.

    Nothing is changed in a server, and a job that it works for notices nothing.

    Args:
        rounds: see `EngineServers`; a server that could not take part in them does not fit.

    Raises:
        ConfigError: the key of the servers is not there, or can't be one.
    """
    key = _key(settings)

    async def look(url: str) -> PalestraError | None:
        api = _api(settings, model, Address(url=url, key=key), rounds, is_started=False)
        try:
            async with asyncio.timeout(INSPECT_SECONDS):
                await api.inspect(getattr(torch, settings.dtype))
        except TimeoutError:
            return EngineFailure(f"{url} takes connections, and has not answered within {INSPECT_SECONDS:g} s")
        except PalestraError as error:
            return error if url in str(error) else ConfigError(f"{url}: {error}")
        finally:
            await api.close()
        return None

    found = await asyncio.gather(*map(look, settings.url or ()))
    return [error for error in found if error is not None]


def _api(
    settings: VllmEngineConfig | SglangEngineConfig,
    model: ServedModel,
    address: Address,
    rounds: WeightRounds | None,
    *,
    is_started: bool,
) -> EngineApi:
    """Return the routes of a policy's server."""
    connection, stop_ids, adapter = EngineConnection(address), model.bounds.stop_ids, model.adapter
    sample = None if is_started else tokenized(model.tokenizer)
    if isinstance(settings, SglangEngineConfig):
        return SglangApi(connection, model.bounds, stop_ids, model.files.folder, sample)
    return VllmApi(
        connection,
        model.bounds,
        stop_ids,
        owner=secrets.token_hex(4),
        seeded=settings.seeds,
        sample=sample,
        rank=None if adapter is None else adapter.rank,
        pictures=model.pictures,
        rendezvous=None if rounds is None or adapter is not None else rounds.rendezvous,
        folder=model.files.folder if is_started else None,
    )


def _served(
    settings: VllmEngineConfig | SglangEngineConfig, place: _Place, rounds: WeightRounds | None
) -> ServedPolicy:
    """Return a policy and the server that samples from it; see `ServedPolicy`."""
    model, adapter = place.model, place.model.adapter
    known: dict[str, Any] = {
        "name": model.name,
        "api": _api(settings, model, place.address, rounds, is_started=place.process is not None),
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
    """Make an empty folder for new weights, below one that is given, or in shared memory."""
    try:
        return Path(tempfile.mkdtemp(prefix="palestra-weights-", dir=parent or weight_folder()))
    except OSError as error:
        raise ConfigError(f"there is no folder for new weights (engine.weights_dir): {error}") from error
