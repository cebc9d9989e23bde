"""Inference workers that are servers of other projects: they are started, or found by their addresses."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from palestra.engine.driver import EngineJob
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import ConfigError, Conflict, EngineFailure, PalestraError, ServerFailed
from palestra.models.weights import weight_folder
from palestra.threads import in_thread
from palestra.types.calls import FIRST_VERSION
from palestra_engines.external.config import ServerEngineConfig
from palestra_engines.external.connection import Address
from palestra_engines.external.engine import ExternalEngine
from palestra_engines.external.process import ServerProcess
from palestra_engines.external.served_models import ServedModel
from palestra_engines.external.served_policy import ExternalPolicy, ServedAdapter

if TYPE_CHECKING:
    from palestra_engines.external.driver import ServerDriver


INSPECT_SECONDS = 20.0  # for a server to say what it is


@dataclass(frozen=True, kw_only=True, slots=True)
class OneServer:
    """The server of a policy.

    Attributes:
        process: the server's; None: it was running already.
        kv_bytes: its key-value memory; 0: unknown.
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
        driver: ServerDriver[Any],
        settings: ServerEngineConfig,
        models: Sequence[ServedModel],
        worker: int,
        logs: Path,
        places: Sequence[Any] | None,
        rounds: Any = None,
    ) -> None:
        """Start the servers, or find them; `engine` waits until they are ready.

        `worker` counts those of the job from 0. `places` are the resources of started servers; None: they are running
        already. `rounds` broadcast whole weights to the servers of all workers; None: they read files.
        """
        self._driver, self._settings, self._rounds = driver, settings, rounds
        self._servers: list[OneServer] = []
        try:
            for number, model in enumerate(models):
                if places is None:
                    self._servers.append(_found(settings, model, worker))
                else:
                    log = logs / f"engine-{model.name}-{worker}.log"
                    self._servers.append(_started(driver, settings, model, places[number], log.absolute()))
        except BaseException:
            self.stop()
            raise

    def engine(self) -> ExternalEngine:
        """Wait until all servers are ready, and return their engine; servers that were running already are not checked.

        Raises ModelError: a server has ended, for example because it cannot serve the model. Raises EngineFailure: a
        timeout.
        """
        try:
            for each in self._servers:
                if each.process is not None:
                    self._driver.wait_until_ready(self._settings, each)
        except BaseException:
            self.stop()
            raise
        served = {each.model.name: self._served(each) for each in self._servers}
        return ExternalEngine(served, self._driver.finishes(self._servers[0].model), self._settings.stuck_seconds)

    def _served(self, server: OneServer) -> ExternalPolicy:
        """Return a policy and the server that samples from it; see `ExternalPolicy`."""
        model, settings, adapter = server.model, self._settings, server.model.adapter
        known: dict[str, Any] = {
            "name": model.name,
            "api": self._driver.api(
                settings, model, server.address, self._rounds, is_started=server.process is not None
            ),
            "bounds": model.bounds,
            "shapes": model.files.shapes,
            "folder": server.folder,
            "dtype": getattr(torch, settings.dtype),
            "process": server.process,
            "kv_bytes": server.kv_bytes,
            "most_calls": 2 * settings.max_batch,  # so that the server has the next request when one is over
            "version": FIRST_VERSION,
        }
        if adapter is not None:
            return ServedAdapter(**known, adapter=adapter, base=str(model.files.folder), first=model.first_adapter)
        return self._driver.broadcast(known, self._rounds) if self._rounds is not None else ExternalPolicy(**known)

    @property
    def addresses(self) -> list[Address]:
        """Return where the servers listen, in the order of the policies."""
        return [each.address for each in self._servers]

    @property
    def process(self) -> int | None:
        """Return the process group leader of the first server; None: none was started here."""
        first = self._servers[0].process
        return None if first is None else first.pid

    def kill(self) -> None:
        """Kill all started servers without waiting."""
        for each in self._servers:
            if each.process is not None:
                each.process.kill()

    def stop(self) -> None:
        """End all started servers, and wait for that."""
        for each in self._servers:
            if each.process is not None:
                each.process.stop()


def _started(
    driver: ServerDriver[Any], settings: ServerEngineConfig, model: ServedModel, place: Any, log: Path
) -> OneServer:
    private = Path(tempfile.mkdtemp(prefix="palestra-", dir="/tmp"))  # short: a socket's path is limited
    weights = _weights_folder(None)
    address = Address(url="http://engine", socket=private / "http", key=secrets.token_urlsafe(24))
    command, variables, kv_bytes = driver.command(settings, model, address, private, place)
    process = ServerProcess(settings.product, command, variables, log, (private, weights))
    return OneServer(model=model, address=address, folder=weights, process=process, kv_bytes=kv_bytes)


def _found(settings: ServerEngineConfig, model: ServedModel, worker: int) -> OneServer:
    """Return the server of a policy that runs already."""
    address = Address(url=settings.urls[worker], key=_key(settings))
    return OneServer(
        model=model, address=address, folder=_weights_folder(settings.weights_dir), process=None, kv_bytes=0
    )


def _key(settings: ServerEngineConfig) -> str:
    """Return the key of running servers; "": they need none."""
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


async def inspect_servers(
    driver: ServerDriver[Any], settings: ServerEngineConfig, model: ServedModel, rounds: Any
) -> list[PalestraError]:
    """Return why running servers cannot serve a policy, in the order of their addresses; empty: all fit.

    Servers are not changed, and jobs that use them are not disturbed. A server that cannot take part in `rounds` does
    not fit; see `EngineServers`.
    """
    key = _key(settings)

    async def look(url: str) -> PalestraError | None:
        api = driver.api(settings, model, Address(url=url, key=key), rounds, is_started=False)
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

    found = await asyncio.gather(*map(look, settings.urls))
    return [error for error in found if error is not None]


def _weights_folder(parent: Path | None) -> Path:
    """Make an empty folder for new weights, below one that is given, or in shared memory."""
    try:
        return Path(tempfile.mkdtemp(prefix="palestra-weights-", dir=parent or weight_folder()))
    except OSError as error:
        raise ConfigError(f"there is no folder for new weights (engine.weights_dir): {error}") from error


AGAIN_SECONDS = 1.0  # between two attempts to reach a server that is gone


class ServerPlaces(Protocol):
    """The resources of each server that a job starts.

    Attributes:
        is_cpu: whether the servers compute on CPUs, where any number of workers shares the machine.
        most: limit of workers.
    """

    is_cpu: bool
    most: int

    def of_worker(self, worker: int) -> Sequence[Any]:
        """Return the resources of a worker's servers, in the order of the policies."""
        ...

    def check_memory(self, workers: Iterable[int]) -> None:
        """Raise ConfigError if there is too little memory for the servers, naming the missing GiB."""
        ...


class ServerWorkers:
    """The workers of a pool, each with its own servers and resources: cores, GPUs, or an address."""

    def __init__(
        self, driver: ServerDriver[Any], job: EngineJob, settings: ServerEngineConfig, models: Sequence[ServedModel]
    ) -> None:
        """Check that the servers can be started, without starting them. Blocks briefly."""
        self._driver, self._settings, self._models = driver, settings, models
        self._logs = job.config.folder
        self._rounds = driver.rounds(settings)
        self._places: ServerPlaces | None = None
        if settings.url is None:
            self._places = driver.places(job, settings, models)
            self._places.check_memory(range(settings.worker_count))  # at first all are started together
        self.most = settings.worker_count if self._places is None else self._places.most
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        self._taken = [False] * self.most
        for place in range(self.most):
            self._free.put_nowait(place)
        self._served: set[int] = set()  # places that have had a worker

    async def check_capacity(self, count: int) -> None:
        """Raise an error if there is too little memory for more workers, before one is started. `count` workers are to
        start in addition to serving ones. Raises Conflict: the message names the missing GiB.
        """
        if (places := self._places) is not None:
            # On GPUs those of the cards that no worker has yet; on CPUs their number alone counts.
            free = [place for place in range(self.most) if places.is_cpu or not self._taken[place]][:count]
            try:
                await in_thread(lambda: places.check_memory(free))
            except ConfigError as error:
                raise Conflict(
                    f"there is no room for {count} more inference worker{'s' * (count > 1)}, and the job goes on with "
                    f"those that it has: {error}"
                ) from error

    def _leave(self, place: int) -> None:
        """Free a position for the next worker."""
        self._taken[place] = False
        self._free.put_nowait(place)

    async def start(self, number: int) -> StartedWorker:
        """Start or find the servers of a worker, and return when they can be used.

        It gets the first free position, whatever its number.
        """
        place = await self._free.get()
        self._taken[place] = True
        try:
            worker = await self._started(place)
        except BaseException as error:
            self._leave(place)
            # The first workers have shown that the servers fit. So a later failure may pass: for a moment there is too
            # little memory, say, or a server of another model was started at one of our addresses.
            is_first = place < self._settings.worker_count and place not in self._served
            if isinstance(error, EngineFailure):
                if is_first and self._places is not None:
                    raise ServerFailed(str(error)) from error  # what takes too long would take as long five times
            elif isinstance(error, PalestraError) and not is_first:
                raise EngineFailure(str(error)) from error
            raise
        self._served.add(place)
        return worker

    async def _started(self, place: int) -> StartedWorker:
        begun = asyncio.ensure_future(in_thread(lambda: self._begun(place)))
        try:
            servers = await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(_end_unwanted)
            raise
        try:
            engine = await in_thread(servers.engine, "palestra-engine-worker")
            await self._reach(engine, place)
        except BaseException:
            servers.kill()
            await in_thread(servers.stop)
            raise

        def kill() -> None:
            servers.kill()
            self._leave(place)

        return StartedWorker(engine, kill, servers.process, found=servers.process is None)

    def _begun(self, place: int) -> EngineServers:
        if self._places is not None and (place in self._served or place >= self._settings.worker_count):
            self._places.check_memory([place])
        on = None if self._places is None else self._places.of_worker(place)
        return EngineServers(self._driver, self._settings, self._models, place, self._logs, on, self._rounds)

    async def _reach(self, engine: ExternalEngine, place: int) -> None:
        """Wait until a worker's servers fit their policies and take weights; one reached before is waited for."""
        while True:
            try:
                await engine.check_servers()
                return
            except EngineFailure:
                if self._settings.url is None or place not in self._served:
                    await engine.close()
                    raise
            except BaseException:
                await engine.close()
                raise
            await asyncio.sleep(AGAIN_SECONDS)


def _end_unwanted(begun: asyncio.Future[EngineServers]) -> None:
    """End servers whose start was cancelled before it was known."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().kill()
