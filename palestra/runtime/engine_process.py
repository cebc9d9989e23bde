"""Engine workers as processes: `EngineProcesses` in the job, and the program of such a process.

python -m palestra.runtime.engine_process FD, where FD is one end of a socket pair with the job. So no other process can
connect, and the worker ends when the job closes its end, or dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from dataclasses import replace

import uvloop

from palestra.backend.engine_worker import EngineOrder, EngineWorkerServer, WorkerEngine
from palestra.engine.cards import CardTurns
from palestra.engine.driver import EngineJob, LoadedEngine, SampledModel, driver_of
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import EngineFailure, PalestraError, ServerFailed
from palestra.models.gpus import VISIBLE
from palestra.pictures.blobs import Blobs
from palestra.pictures.kept import StoredPictures
from palestra.process.channel import Channel
from palestra.process.child import ProcessStarter, die_with_parent, how_lost, start_process
from palestra.runtime.numerics import numerics_of
from palestra.threads import in_thread

REAP_SECONDS = 2.0  # between the end of a worker's socket and that of its process
PROGRAM = "palestra.runtime.engine_process"


class EngineProcesses:
    """Starts the workers of a job, all with the same models, on this machine or in a cluster."""

    def __init__(self, job: EngineJob, start: ProcessStarter = start_process, cards: CardTurns | None = None) -> None:
        """Begin without workers. `job` has each worker's threads and memory; without `cards` each finds its own GPU, or
        none.
        """
        self._start, self._cards = start, cards or CardTurns(())
        self._numerics: dict[str, str] = {}
        self._order = EngineOrder(
            config=job.config,
            weights=job.weights,
            pictures=None if job.pictures is None else job.pictures.folder.absolute(),
            number=0,
            numerics={},
        )
        self.models: dict[str, SampledModel] = {}  # by policy; those of the newest worker, of which all have the same
        self._has_started = False

    async def start(self, number: int) -> StartedWorker:
        """Start a worker, and return when it has loaded its models. `number` is for the names of logs; GPUs are
        assigned by least use.
        """
        visible = self._cards.take()
        try:
            return await self._started(number, visible)
        except BaseException:
            self._cards.give_back(visible)
            raise

    async def _expected(self) -> dict[str, str]:
        """Return the numerics that each worker of a deterministic job must have; {}: any."""
        config = self._order.config
        if config.deterministic and not self._numerics:
            self._numerics = await in_thread(lambda: numerics_of(config))
        return self._numerics

    async def _started(self, number: int, visible: str | None) -> StartedWorker:
        """Start a worker on some cards, and return when it has loaded its models; see `start`."""
        try:
            process = await self._start(PROGRAM, {} if visible is None else {VISIBLE: visible})
        except ServerFailed as error:  # another start may succeed
            raise EngineFailure(str(error)) from error

        try:
            channel = await Channel.over(process.connection)
            worker = WorkerEngine(channel, lambda: how_lost(process, REAP_SECONDS))
        except BaseException:
            process.kill()
            raise
        try:
            found = await worker.begin(replace(self._order, number=number, numerics=await self._expected()))
        except BaseException as error:
            process.kill()
            worker.lose("was ended by the job")
            if self._has_started and isinstance(error, PalestraError) and not isinstance(error, EngineFailure):
                # What was there for another worker may be there again in a moment: memory, say.
                raise EngineFailure(str(error)) from error
            raise
        self._has_started = True
        self.models = {name: SampledModel(*sizes) for name, sizes in found.items()}

        def kill() -> None:
            process.kill()
            worker.lose("was ended by the job")
            self._cards.give_back(visible)

        return StartedWorker(worker.engine, kill, process.pid)


class ProcessHost:
    """Starts processes for inference workers, on this machine or in bundles of a cluster; see `WorkerHost`."""

    def __init__(self, start: ProcessStarter | None = None) -> None:
        """Begin without workers. `start` starts a worker in a bundle of its own; None: workers share this machine with
        the job.
        """
        self._start, self.in_bundles = start or start_process, start is not None

    def processes(self, job: EngineJob, cards: CardTurns | None = None) -> EngineProcesses:
        """Return what starts workers that load the engine of a job; see `WorkerHost`."""
        return EngineProcesses(job, self._start, cards)


def _load(order: EngineOrder) -> LoadedEngine:
    """Return the engine that a job orders."""
    config = order.config
    if config.engine.has_model:
        from palestra.models.device import tune_malloc

        tune_malloc()  # before torch is loaded
    pictures = None if order.pictures is None else StoredPictures(Blobs(order.pictures))
    # All that this process has is this worker's: the trainer has a bundle of its own, or the job's.
    job = EngineJob(config=config, weights=order.weights, pictures=pictures, trainer_is_here=False, worker=order.number)
    (table,) = config.engine.tables
    loaded = driver_of(table).load(job, table)
    if before := order.numerics:
        from palestra.models.numerics import KERNELS, check_numerics, numerics

        check_numerics(before, numerics(KERNELS in before), "the job's other processes compute")
    return loaded


async def _serve(connection: socket.socket) -> None:
    await EngineWorkerServer(await Channel.over(connection), _load).run()


def _main() -> None:
    """Serve an engine to the job that started this process."""
    die_with_parent()
    # Ctrl-C reaches all processes of a terminal; the job decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"%(name)s[{os.getpid()}]: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
        sys.stderr.flush()
        os._exit(0)  # models and threads are not taken down one by one


if __name__ == "__main__":
    _main()
