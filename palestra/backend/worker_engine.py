"""The side of a job: an engine in a process of its own, as an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palestra.backend.engine_worker import EngineOrder, WorkerMethods
from palestra.engine.base import EngineLoad
from palestra.errors import EngineFailure, InvalidRequest
from palestra.models.weights import WeightSource
from palestra.process.channel import Channel, Event, Remote
from palestra.process.codec import decode
from palestra.process.stub import proxy, remote_method
from palestra.types.calls import FIRST_VERSION, PolicyVersion


class WorkerEngine:
    """The methods of `Engine` that the job answers without the worker.

    The end of the channel is the end of the worker: all calls fail.

    Attributes:
        engine: the complete engine; its other methods are remote calls.
    """

    def __init__(self, channel: Channel, cause: Callable[[], Awaitable[str]]) -> None:
        """Start to receive.

        Args:
            channel: to the worker; closed by `close`.
            cause: returns how the worker died, after its end of the channel closed.
        """
        self._cause = cause
        self._versions: dict[str, PolicyVersion] = {}
        self._load = EngineLoad(waiting=0, running=0)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._remote = Remote(channel, self._ended, self._take)
        self.engine = proxy(WorkerMethods, self._remote, self)

    async def begin(self, order: EngineOrder) -> dict[str, tuple[int, int]]:
        """Load the models in the worker; see `WorkerMethods.begin`."""
        found: dict[str, tuple[int, int]] = await remote_method(WorkerMethods, "begin", self._remote)(order)
        return found

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Replace a policy's weights by those of a file or folder; see `Engine.sync_weights`."""
        await remote_method(WorkerMethods, "sync_weights", self._remote)(policy, version, source)
        self._versions[policy] = version

    async def remove_policy(self, name: str) -> None:
        """Free the memory of a policy; see `Engine.remove_policy`."""
        await remote_method(WorkerMethods, "remove_policy", self._remote)(name)
        self._versions.pop(name, None)

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy for sampling; see `Engine.add_policy`."""
        await remote_method(WorkerMethods, "add_policy", self._remote)(name, like, version, source)
        self._versions[name] = version

    def version(self, policy: str) -> PolicyVersion:
        """Return the weights' version from which a policy is sampled now."""
        return self._versions.get(policy, FIRST_VERSION)

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
