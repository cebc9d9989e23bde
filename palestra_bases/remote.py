"""The engine and the trainer of a base server, as a job uses them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from palestra.engine.base import Engine, EngineLoad, EngineRequest, TokenReplay
from palestra.engine.remote_weights import SampledVersions
from palestra.errors import BaseServerLost, EngineFailure, NotFound
from palestra.process.channel import Event
from palestra.process.codec import decode
from palestra.process.stub import proxy, remote_method
from palestra.trainer import checkpoint
from palestra.trainer.base import Trainer
from palestra.types.calls import FIRST_VERSION, PolicyVersion, SampledTokens
from palestra_bases.base import SamplerSpec
from palestra_bases.link import Link
from palestra_bases.protocol import BaseCalls


class RemoteEngine(SampledVersions):
    """The parts of `Engine` that a job does not leave to the engine of its base server.

    Pausing holds this job's calls back, and nothing of other jobs. A reply whose connection is lost is sampled again
    under its seed, and continues where it stood. After the server has forgotten the job, calls wait until `resume`.

    Attributes:
        engine: the whole; its other methods are called there.
    """

    def __init__(self, link: Link) -> None:
        """Use a connection, which this object closes."""
        super().__init__(link.remote, "engine")
        self._link = link
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
        """Stream a reply; see `Engine.generate`. Raises ReplyLost if it was resampled, and came out differently."""
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

    async def pause(self) -> None:
        """Let no call of this job begin until `resume`, and wait for running ones."""
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        """Let calls begin again after `pause`, or after the base server had forgotten the job."""
        if not self._link.is_lost:
            self._open.set()

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


class RemoteTrainer:
    """The parts of `Trainer` that a job does not leave to the trainer of its base server.

    Rows go there and numbers come back; weights, moments and gradients stay. The server writes checkpoints into the
    job's folder, so both have to be on one machine, or see the same disk under the same path.

    Attributes:
        trainer: the whole; its other methods are called there.
    """

    def __init__(self, link: Link, keep: int) -> None:
        """Use a connection, which this object closes."""
        self._link, self._keep = link, keep
        self._versions: dict[str, PolicyVersion] = {}
        link.on_event = self._take
        self.trainer = proxy(Trainer, link.remote, self, "trainer")

    def forget(self) -> None:
        """Drop all policies, because the base server has forgotten the job."""
        self._versions.clear()

    async def save(self, policy: str, folder: Path, state: Mapping[str, Any], request_id: str) -> Path:
        """Make the base server write a checkpoint, and remove older ones; see `Trainer.save`."""
        path: Path = await remote_method(Trainer, "save", self._link.remote, "trainer")(
            policy, folder, state, request_id
        )
        checkpoint.keep_newest(folder, self._keep)
        return folder / path.name

    async def remove(self, policy: str) -> None:
        """Make the base server remove a policy; see `Trainer.remove`."""
        await remote_method(Trainer, "remove", self._link.remote, "trainer")(policy)
        del self._versions[policy]

    def version(self, policy: str) -> PolicyVersion:
        """Return the last known version of a policy's master weights."""
        if policy not in self._versions:
            raise NotFound(f"the trainer has no policy {policy!r}")
        return self._versions[policy]

    def begin_incarnation(self, policy: str, incarnation: int) -> None:
        """Set the incarnation of all later versions; see `Trainer.begin_incarnation`.

        The call is sent after earlier ones, and its error is raised by the next one.
        """
        self._versions[policy] = PolicyVersion(incarnation, self.version(policy).n)
        answer = self._link.remote.post("trainer.begin_incarnation", policy, incarnation)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Disconnect from the base server, which then frees all policies."""
        await self._link.leave()

    def _take(self, event: Event) -> None:
        if event.name == "version":
            policy, version = decode(tuple[str, PolicyVersion], event.value)
            self._versions[policy] = version
