"""Engine workers as processes: `EngineProcesses` in the job, and the program that such a process runs.

python -m palestra.runtime.engine_process FD, where FD is one end of a socket, whose other end the job's process has. So
no other process can connect, and the worker ends when the job closes its end, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from palestra.backend.channel import Channel
from palestra.backend.engine_worker import EngineWorker
from palestra.backend.errors import error_fields, error_of
from palestra.backend.worker_engine import WorkerEngine
from palestra.config import JobConfig
from palestra.engine.cards import CardTurns
from palestra.engine.driver import EngineJob, LoadedEngine, SampledModel, driver_of
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import EngineFailure, PalestraError, ServerFailed
from palestra.models.gpus import VISIBLE
from palestra.pictures.blobs import Blobs
from palestra.pictures.stored import StoredPictures
from palestra.process.child import ProcessStarter, die_with_parent, open_stream, start_process
from palestra.runtime.numerics import numerics_of
from palestra.threads import in_thread
from palestra.waiting import cancelled, race

REAP_SECONDS = 2.0  # between the end of a worker's socket and that of its process
PROGRAM = "palestra.runtime.engine_process"


class EngineProcesses:
    """Starts the workers of a job, all with the same models, on this machine or where a cluster has given them room."""

    def __init__(self, job: EngineJob, start: ProcessStarter = start_process, cards: CardTurns | None = None) -> None:
        """Start none yet.

        Args:
            job: with what each worker has of threads and memory.
            cards: on which the workers compute; None: on no card, or on those that each finds itself.
        """
        self._start, self._cards = start, cards or CardTurns(())
        self._config = job.config
        self._numerics: dict[str, str] = {}
        self._order = {
            "config": job.config.model_dump(mode="json"),
            "weights": dict(job.weights),
            "pictures": None if job.pictures is None else str(job.pictures.folder.absolute()),
        }
        self.models: dict[str, SampledModel] = {}  # by policy; those of the newest worker, of which all have the same
        self._has_started = False

    async def start(self, number: int) -> StartedWorker:
        """Start a worker, and return when it has loaded its models.

        Args:
            number: of the worker's place, for the names of logs: each gets the cards that the fewest others have.

        Raises:
            EngineFailure: the process has died, or it can't load now what another one has loaded.
            PalestraError: the models can't be loaded.
        """
        visible = self._cards.take()
        try:
            return await self._started(number, visible)
        except BaseException:
            self._cards.give_back(visible)
            raise

    async def _expected(self) -> dict[str, str]:
        """Return what has to compute in each worker of a deterministic job; {}: anything may."""
        if self._config.deterministic and not self._numerics:
            self._numerics = await in_thread(lambda: numerics_of(self._config))
        return self._numerics

    async def _started(self, number: int, visible: str | None) -> StartedWorker:
        """Start a worker on some cards, and return when it has loaded its models; see `start`."""
        try:
            process = await self._start(PROGRAM, {} if visible is None else {VISIBLE: visible})
        except ServerFailed as error:  # another start may succeed
            raise EngineFailure(str(error)) from error
        reader, writer = await open_stream(process.connection)
        channel = Channel(reader, writer)

        async def cause() -> str:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP_SECONDS):
                    return await process.how_ended()
            return "has closed its connection"

        try:
            channel.send({"order": self._order | {"place": number, "numerics": await self._expected()}})
            answer = await _first(channel)
            if answer is None:
                raise EngineFailure(f"the process {await cause()}")
            if "error" in answer:
                refused = error_of(answer["error"])
                if self._has_started and not isinstance(refused, EngineFailure):
                    # What was there for another worker may be there again in a moment: memory, say.
                    raise EngineFailure(str(refused)) from refused
                raise refused
        except BaseException:
            process.kill()
            channel.close()
            raise
        self._has_started = True
        self.models = {name: SampledModel(*found) for name, found in answer["models"].items()}
        engine = WorkerEngine(channel, cause)

        def kill() -> None:
            process.kill()
            engine.lose("was ended by the job")
            self._cards.give_back(visible)

        return StartedWorker(engine, kill, process.pid)


class ProcessHost:
    """Starts processes for inference workers, on this machine or in bundles of a cluster; see `WorkerHost`."""

    def __init__(self, start: ProcessStarter | None = None) -> None:
        """Start none yet.

        Args:
            start: starts a worker in a bundle of its own; None: workers share this machine with the job.
        """
        self._start, self.in_bundles = start or start_process, start is not None

    def processes(self, job: EngineJob, cards: CardTurns | None = None) -> EngineProcesses:
        """Return what starts workers that load the engine of a job; see `WorkerHost`."""
        return EngineProcesses(job, self._start, cards)


async def _first(channel: Channel) -> dict[str, Any] | None:
    """Return the first message of the other side; None: the channel was closed."""
    async with contextlib.aclosing(channel.frames()) as frames:  # type: ignore[type-var]
        async for frame in frames:
            first: dict[str, Any] = frame.header["messages"][0]
            return first
    return None


# The process


async def _serve(number: int) -> None:
    """Load what the job orders, and serve it until the job has gone."""
    reader, writer = await open_stream(socket.socket(fileno=number))
    channel = Channel(reader, writer, sends_json=True)
    message = await _first(channel)
    if message is None:
        return
    loading = asyncio.create_task(in_thread(lambda: _load(message["order"]), "palestra-load"))
    gone = asyncio.create_task(_first(channel))  # the job sends nothing before it has an answer
    try:
        if (await race(asyncio.shield(loading), asyncio.shield(gone))).index == 1:
            return
        loaded = loading.result()
        if loaded.check is not None:
            await loaded.check()
    except PalestraError as error:
        channel.send({"error": error_fields(error)})
        await channel.drain()
        return
    finally:
        await cancelled(gone)
    models = {name: (policy.vocab_size, policy.max_context) for name, policy in loaded.policies.items()}
    channel.send({"models": models})
    await channel.drain()
    await EngineWorker(loaded.engine, channel).run()


def _load(order: dict[str, Any]) -> LoadedEngine:
    """Return the engine that a job orders."""
    config = JobConfig.model_validate(order["config"])
    if config.engine.has_model:
        from palestra.models.device import tune_malloc

        tune_malloc()  # before torch is loaded
    pictures = None if order["pictures"] is None else StoredPictures(Blobs(Path(order["pictures"])))
    # All that this process has is this worker's: the trainer has a bundle of its own, or the job's.
    job = EngineJob(
        config=config, weights=order["weights"], pictures=pictures, trainer_is_here=False, worker=order["place"]
    )
    (table,) = config.engine.tables
    loaded = driver_of(table).load(job, table)
    if before := order["numerics"]:
        from palestra.models.numerics import KERNELS, check_numerics, numerics

        check_numerics(before, numerics(KERNELS in before), "the job's other processes compute")
    return loaded


def main() -> None:
    """Serve an engine to the job that has started this process."""
    die_with_parent()
    # Ctrl-C reaches all processes of a terminal; the job decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"%(name)s[{os.getpid()}]: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1])))
        sys.stderr.flush()
        os._exit(0)  # models and threads are not taken down one by one


if __name__ == "__main__":
    main()
