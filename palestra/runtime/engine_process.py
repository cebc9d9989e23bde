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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import uvloop

from palestra.config import JobConfig
from palestra.engine.base import Engine, EngineLoad
from palestra.engine.cards import CardTurns
from palestra.engine.driver import EngineJob, LoadedEngine, SampledModel, driver_of
from palestra.engine.pool.worker import StartedWorker
from palestra.engine.remote_weights import SampledVersions
from palestra.errors import EngineFailure, InvalidRequest, PalestraError, ServerFailed
from palestra.models.gpus import VISIBLE
from palestra.pictures.blobs import Blobs, StoredPictures
from palestra.process.channel import Channel, Event, Remote, raw
from palestra.process.child import ProcessStarter, die_with_parent, start_process
from palestra.process.codec import decode
from palestra.process.stub import Server, proxy
from palestra.runtime.early_checks import numerics_of
from palestra.threads import in_thread
from palestra.waiting import cancelled, race

log = logging.getLogger("palestra.engine")
LOAD_SECONDS = 0.2  # between two reports of what the engine has done
GRACE_SECONDS = 0.2  # between the failure of a request and the news that the engine has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOrder:
    """The settings of one engine worker.

    Attributes:
        config: the job, with the settings of this worker only.
        pictures: folder with the images of prompts, if any.
        number: of the worker, among those of the job.
        numerics: required numerics of the worker; {}: any.
    """

    config: JobConfig
    weights: Mapping[str, str]
    pictures: Path | None
    number: int
    numerics: Mapping[str, str]


class WorkerMethods(Engine, Protocol):
    """The methods that a job calls: `begin`, and then the engine's."""

    async def begin(self, order: EngineOrder) -> dict[str, SampledModel]:
        """Load the models of all policies. Raises PalestraError: loading failed."""
        ...


class EngineWorkerServer:
    """Serves one engine to one job."""

    def __init__(self, channel: Channel, load: Callable[[EngineOrder], LoadedEngine]) -> None:
        """Create the worker. `load` creates the engine, in its own thread."""
        self._channel, self._load = channel, load
        self._engine: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._failure: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Serve until the job closes the channel, or the engine fails, which is reported to the job."""
        await race(Server(self._channel, {"": (WorkerMethods, self)}, self._sent).run(), self._report())

    async def begin(self, order: EngineOrder) -> dict[str, SampledModel]:
        """Load the models; see `WorkerMethods.begin`."""
        loaded = await in_thread(lambda: self._load(order), "palestra-load")
        if loaded.check is not None:
            await loaded.check()
        self._engine.set_result(loaded.engine)
        return {name: SampledModel(one.vocab_size, one.max_context) for name, one in loaded.policies.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.result(), name)

    async def _report(self) -> None:
        """Report the engine's progress to the job until the engine fails."""
        engine = await self._engine
        failure = self._failure = asyncio.create_task(engine.failure())
        said: EngineLoad | None = None
        try:
            while not failure.done():
                if (now := engine.load()) != said:
                    said = now
                    self._channel.send(Event("load", raw(now)))
                await asyncio.wait((failure,), timeout=LOAD_SECONDS)
            self._channel.send(Event("failed", raw(failure.result())))
            await self._channel.drain()
        finally:
            await cancelled(failure)

    async def _sent(self, error: Exception) -> Exception | None:
        """Return the error of a call for the job; None: the engine has failed, which answers all calls."""
        if isinstance(error, EngineFailure) and self._failure is not None:
            await asyncio.wait((self._failure,), timeout=GRACE_SECONDS)
            return None if self._failure.done() else error
        if isinstance(error, PalestraError):
            return error
        log.error("a call of an engine worker failed", exc_info=error)
        return EngineFailure(f"the engine failed: {type(error).__name__}: {error}")


class WorkerEngine(SampledVersions):
    """The methods of `Engine` that the job answers without the worker.

    The end of the channel is the end of the worker: all calls fail.

    Attributes:
        engine: the complete engine; its other methods are remote calls.
    """

    def __init__(self, channel: Channel, cause: Callable[[], Awaitable[str]]) -> None:
        """Start to receive. `close` closes the channel; `cause` returns how the worker died, after its end of the
        channel closed.
        """
        self._cause = cause
        self._load = EngineLoad(waiting=0, running=0)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._remote = Remote(channel, self._ended, self._take)
        super().__init__(self._remote)
        self.engine = proxy(WorkerMethods, self._remote, self)

    def load(self) -> EngineLoad:
        """Return the worker's last report, a fraction of a second old."""
        return self._load

    async def failure(self) -> str:
        """Wait until the worker fails or dies, and return the reason."""
        return await asyncio.shield(self._lost)

    def lose(self, why: str) -> None:
        """Declare the worker lost, and fail all its calls; the first reason counts."""
        if not self._lost.done():
            self._lost.set_result(why)
            self._remote.lose(EngineFailure(f"an engine worker {why}"))

    async def close(self) -> None:
        """Close the channel, which ends the worker, and fail all calls."""
        self.lose("was closed")
        await self._remote.close()

    async def _ended(self, problem: InvalidRequest | None) -> Exception:
        self.lose(await self._cause() if problem is None else f"sent what is no message: {problem}")
        return EngineFailure(f"an engine worker {self._lost.result()}")

    def _take(self, event: Event) -> None:
        if event.name == "load":
            self._load = decode(EngineLoad, event.value)
        else:
            self.lose(f"has failed: {decode(str, event.value)}")


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
            worker = WorkerEngine(channel, lambda: process.how_lost(REAP_SECONDS))
        except BaseException:
            process.kill()
            raise
        try:
            order = replace(self._order, number=number, numerics=await self._expected())
            self.models = await worker.engine.begin(order)
        except BaseException as error:
            process.kill()
            worker.lose("was ended by the job")
            if self._has_started and isinstance(error, PalestraError) and not isinstance(error, EngineFailure):
                # What was there for another worker may be there again in a moment: memory, say.
                raise EngineFailure(str(error)) from error
            raise
        self._has_started = True

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
