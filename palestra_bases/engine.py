"""The engine of a base server, as a job uses it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from palestra.engine.base import Engine, EngineLoad, EngineRequest, TokenReplay
from palestra.errors import BaseServerLost, EngineFailure
from palestra.models.weights import WeightSource
from palestra.process.stub import proxy, remote_method
from palestra.types.calls import FIRST_VERSION, PolicyVersion, SampledTokens
from palestra_bases.base import SamplerSpec
from palestra_bases.link import Link
from palestra_bases.protocol import BaseCalls


class RemoteEngine:
    """The parts of `Engine` that a job does not leave to the engine of its base server.

    Pausing holds this job's calls back, and nothing of other jobs. A reply whose connection is lost is sampled again
    under its seed, and continues where it stood. After the server has forgotten the job, calls wait until `resume`.

    Attributes:
        engine: the whole; its other methods are called there.
    """

    def __init__(self, link: Link) -> None:
        """Use a connection, which this object closes."""
        self._link = link
        self._versions: dict[str, PolicyVersion] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._waiting = self._running = self._sampled_tokens = 0
        link.on_lost = self._open.clear
        self._pieces = remote_method(Engine, "generate", link.remote, "engine")
        self.engine = proxy(Engine, link.remote, self, "engine")

    async def sample(self, policy: str, spec: SamplerSpec) -> None:
        """Add one of the job's policies to the base server's engine, at version 0.0."""
        await remote_method(BaseCalls, "sample", self._link.remote, "base")(policy, spec)
        self._versions[policy] = FIRST_VERSION

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        """Stream a reply; see `Engine.generate`.

        Raises:
            ReplyLost: the reply was resampled, and came out differently.
        """
        replay = TokenReplay()
        while True:
            await self._begin()
            try:
                async with contextlib.aclosing(self._pieces(request)) as pieces:
                    async for piece in pieces:
                        if (fresh := replay.take(piece)) is not None:
                            self._sampled_tokens += len(fresh.ids)
                            yield fresh
                replay.end()
                return
            except BaseServerLost:
                replay.begin_again()
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

    async def _begin(self) -> None:
        """Wait until a call may begin, and count it as running."""
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        if self._closed:
            raise EngineFailure("the engine was stopped")
        self._running += 1
        self._idle.clear()

    async def sync_weights(self, policy: str, version: PolicyVersion, source: WeightSource) -> None:
        """Make the base server's engine take weights from its trainer, or from a folder; see `Engine.sync_weights`."""
        await self._remote("sync_weights", policy, version, source)
        self._versions[policy] = version

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        """Add a policy; see `Engine.add_policy`."""
        await self._remote("add_policy", name, like, version, source)
        self._versions[name] = version

    async def remove_policy(self, name: str) -> None:
        """Remove a policy; see `Engine.remove_policy`."""
        await self._remote("remove_policy", name)
        self._versions.pop(name, None)

    async def _remote(self, name: str, *arguments: Any) -> None:
        await remote_method(Engine, name, self._link.remote, "engine")(*arguments)

    async def pause(self) -> None:
        """Let no call of this job begin until `resume`, and wait for running ones."""
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        """Let calls begin again after `pause`, or after the base server had forgotten the job."""
        if not self._link.is_lost:
            self._open.set()

    def version(self, policy: str) -> PolicyVersion:
        """Return the version of a policy's weights."""
        return self._versions.get(policy, FIRST_VERSION)

    def load(self) -> EngineLoad:
        """Return this job's calls and sampled tokens; passes are shared by all jobs."""
        return EngineLoad(waiting=self._waiting, running=self._running, sampled_tokens=self._sampled_tokens)

    async def failure(self) -> str:
        """Wait until the base server is given up, and return the reason."""
        return str(await self._link.failure())

    async def close(self) -> None:
        """Fail open calls, and disconnect from the base server."""
        self._closed = True
        self._open.set()
        await self._link.leave()
