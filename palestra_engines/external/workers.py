"""Inference workers that are servers of other projects: they are started, or found by their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from palestra.engine.driver import EngineJob
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import ConfigError, Conflict, EngineFailure, PalestraError, ServerFailed
from palestra.threads import in_thread
from palestra_engines.external.config import ServerEngineConfig
from palestra_engines.external.engine import ExternalEngine
from palestra_engines.external.served_models import ServedModel
from palestra_engines.external.servers import EngineServers

if TYPE_CHECKING:
    from palestra_engines.external.driver import ServerDriver

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
        """Wait until the servers of a worker fit their policies, and can take weights.

        A running server that was reached before is waited for: its operator restarts it.
        """
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
