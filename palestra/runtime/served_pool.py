"""Inference workers that are servers of other projects: they are started, or found by their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from palestra.config import JobConfig, SglangEngineConfig, VllmEngineConfig
from palestra.engine.external.engine import ExternalEngine
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import EngineFailure, PalestraError
from palestra.runtime.engine_servers import EngineServers, weight_rounds
from palestra.runtime.served_models import ServedModel
from palestra.threads import in_thread

MOST_STARTED = 64  # workers that a job starts
AGAIN_SECONDS = 1.0  # between two attempts to reach a server that is gone


class ServerWorkers:
    """The workers of a pool, each with servers of its own, at a place of its own: cores, cards, or an address."""

    def __init__(
        self, config: JobConfig, settings: VllmEngineConfig | SglangEngineConfig, models: Sequence[ServedModel]
    ) -> None:
        """Start none yet.

        Args:
            config: the job.
            settings: of its engine.
            models: of its policies.

        Raises:
            ConfigError: this process can't broadcast weights, although it should.
        """
        self._config, self._settings, self._models = config, settings, models
        self._rounds = weight_rounds(settings)
        self.most = MOST_STARTED if settings.url is None else len(settings.url)
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        for place in range(self.most):
            self._free.put_nowait(place)
        self._served: set[int] = set()  # places that have had a worker

    async def start(self, number: int) -> StartedWorker:
        """Start the servers of a worker, or find them, and return when they can be asked.

        Args:
            number: of the worker, without effect: it gets the first place that is free.

        Raises:
            EngineFailure: they did not start; another start may succeed.
            PalestraError: no start can succeed: the servers can't serve the model, say.
        """
        place = await self._free.get()
        try:
            worker = await self._started(place)
        except BaseException as error:
            self._free.put_nowait(place)
            final = isinstance(error, PalestraError) and not isinstance(error, EngineFailure)
            if final and self._served and (place in self._served or place >= self._settings.workers):
                # The first workers have shown that the servers fit. So this failure may pass: for a moment there is
                # too little memory, say, or a server of another model was started at one of our addresses.
                raise EngineFailure(str(error)) from error
            raise
        self._served.add(place)
        return worker

    async def _started(self, place: int) -> StartedWorker:
        others = 0 if self._served else self._settings.workers - 1  # at first all are started together
        servers = await in_thread(
            lambda: EngineServers(self._config, self._settings, self._models, place, others, self._rounds)
        )
        try:
            engine = await in_thread(servers.engine, "palestra-engine-worker")
            await self._reach(engine, place)
        except BaseException:
            servers.kill()
            await in_thread(servers.stop)
            raise

        def kill() -> None:
            servers.kill()
            self._free.put_nowait(place)

        return StartedWorker(engine, kill, servers.process)

    async def _reach(self, engine: ExternalEngine, place: int) -> None:
        """Return when the servers of a worker fit their policies, and can be given weights.

        A server that runs already and was reached before is waited for: its operator starts it again.
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
