"""An engine in a process of its own: the worker serves it and says how far it is; the job has it as an `Engine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from palestra.backend.weights import SampledVersions
from palestra.config import JobConfig
from palestra.engine.base import Engine, EngineLoad
from palestra.errors import EngineFailure, InvalidRequest, PalestraError
from palestra.process.channel import Channel, Event, Remote, raw
from palestra.process.codec import decode
from palestra.process.stub import Server, proxy, remote_method
from palestra.threads import in_thread
from palestra.waiting import cancelled, race

if TYPE_CHECKING:
    from palestra.engine.driver import LoadedEngine


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

    async def begin(self, order: EngineOrder) -> dict[str, tuple[int, int]]:
        """Load the models, and return the fields of `SampledModel` by policy. Raises PalestraError: loading failed."""
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

    async def begin(self, order: EngineOrder) -> dict[str, tuple[int, int]]:
        """Load the models; see `WorkerMethods.begin`."""
        loaded = await in_thread(lambda: self._load(order), "palestra-load")
        if loaded.check is not None:
            await loaded.check()
        self._engine.set_result(loaded.engine)
        return {name: (one.vocab_size, one.max_context) for name, one in loaded.policies.items()}

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


# The side of the job


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

    async def begin(self, order: EngineOrder) -> dict[str, tuple[int, int]]:
        """Load the models in the worker; see `WorkerMethods.begin`."""
        found: dict[str, tuple[int, int]] = await remote_method(WorkerMethods, "begin", self._remote)(order)
        return found

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
