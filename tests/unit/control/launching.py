"""A launcher of nothing: model servers that start, end and die as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.types.gpus import GpuReading
from palestra_service.jobs.launcher import BaseOrder, Ended, Ending, Listening, ServerOrder
from palestra_service.placement.fitting import Node
from unit.waiting import until


@dataclass
class Server:
    """One that was asked for."""

    order: ServerOrder | BaseOrder
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stopped_with: float | None = None
    heard: Callable[[Any], None] | None = None


class FakeLauncher:
    """Implements `Launcher`. `quick`: servers listen at once."""

    def __init__(self, *nodes: Node, quick: bool = True) -> None:
        self.machines = list(nodes) or [Node(node_id="n1", cpus=4.0, gpus=2, memory_gib=16.0)]
        self.quick, self.error = quick, None
        self.servers: dict[str, Server] = {}
        self.started: list[str] = []
        self.cards: dict[str, GpuReading] = {}  # by machine
        self.given: dict[str, tuple[int, ...]] = {}  # devices, by job

    async def nodes(self) -> list[Node]:
        return list(self.machines)

    async def gpu_use(self, nodes: Sequence[Node]) -> dict[str, GpuReading]:
        return self.cards

    async def start(self, order: ServerOrder | BaseOrder) -> Listening:
        server = self.servers[order.job_id] = Server(order)
        self.started.append(order.job_id)
        if self.quick:
            server.listening.set()
        try:
            await server.listening.wait()
        except asyncio.CancelledError:
            del self.servers[order.job_id]
            raise
        if self.error is not None:
            del self.servers[order.job_id]
            raise self.error
        return self._listening(order.job_id)

    async def find(self, job_id: str) -> Listening | None:
        return self._listening(job_id) if job_id in self.servers else None

    async def known(self) -> list[str]:
        return list(self.servers)

    async def ended(self, job_id: str, heard: Callable[[Any], None]) -> Ended:
        self.servers[job_id].heard = heard
        found = await asyncio.shield(self.servers[job_id].over)
        self.servers.pop(job_id, None)
        return found

    async def stop(self, job_id: str, grace_seconds: float) -> None:
        if job_id in self.servers and not self.servers[job_id].over.done():
            self.servers[job_id].stopped_with = grace_seconds
            self.end(job_id, Ending.STOPPED)

    async def close(self) -> None: ...

    def _listening(self, job_id: str) -> Listening:
        return Listening(url=f"http://n1/{job_id}", devices=self.given.get(job_id, ()))

    async def answer(self, job_id: str, seconds_left: float | None) -> None:
        """Report the time left, as soon as the scheduler listens: a job is RUNNING a moment before that."""
        server = self.servers[job_id]

        async def listens() -> bool:
            return server.heard is not None

        await until(listens)
        assert server.heard is not None
        server.heard(seconds_left)

    def end(self, job_id: str, ending: Ending, reason: str = "") -> None:
        self.servers[job_id].over.set_result(Ended(ending=ending, reason=reason))
