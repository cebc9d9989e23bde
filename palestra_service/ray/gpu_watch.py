"""Figures of the cluster's GPUs: an actor on each machine with GPUs reads its driver."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from palestra.models.gpus import GpuMeter, GpuReader
from palestra.types.gpus import GpuReading
from palestra_service.placement.fitting import Node

EVERY_SECONDS = 2.0  # between two questions to a machine
WAIT_SECONDS = 1.0  # what an answer waits for machines
ASK_SECONDS = 30.0  # an actor that takes longer is replaced
AGAIN_SECONDS = 30.0  # pause after a machine that could not be asked
NEW = GpuReading((), "the machine was not asked yet")


class GpuWatch:
    """Queries machines for their GPU figures on demand, at most every two seconds."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}  # by machine
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, GpuReading] = {}
        self._due: dict[str, float] = {}

    async def read(self, nodes: Iterable[Node]) -> dict[str, GpuReading]:
        """Return the known figures of each living machine with GPUs, by id."""
        wanted = [node.node_id for node in nodes if node.alive and node.gpus]
        for gone in self._actors.keys() - set(wanted):
            self._forget(gone)
        now = time.monotonic()
        for node_id in wanted:
            if node_id not in self._asking and now >= self._due.get(node_id, 0.0):
                self._asking[node_id] = asyncio.create_task(self._ask(node_id))
        if asking := [self._asking[node_id] for node_id in wanted if node_id in self._asking]:
            await asyncio.wait(asking, timeout=WAIT_SECONDS)
        return {node_id: self._known.get(node_id, NEW) for node_id in wanted}

    async def close(self) -> None:
        """End all actors."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        for node_id in list(self._actors):
            self._forget(node_id)

    async def _ask(self, node_id: str) -> None:
        pause = EVERY_SECONDS
        try:
            async with asyncio.timeout(ASK_SECONDS):
                if node_id not in self._actors:
                    self._actors[node_id] = await asyncio.to_thread(_gpu_reader, node_id)
                self._known[node_id] = await self._actors[node_id].read.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            why = str(error).strip().splitlines() or [f"no answer within {ASK_SECONDS:g} s"]
            self._known[node_id] = GpuReading((), f"the machine can't be asked: {why[0]}")
            self._forget(node_id)
            pause = AGAIN_SECONDS
        finally:
            del self._asking[node_id]
            self._due[node_id] = time.monotonic() + pause

    def _forget(self, node_id: str) -> None:
        if (actor := self._actors.pop(node_id, None)) is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # it has ended, or the cluster has
                ray.kill(actor)


def _gpu_reader(node_id: str) -> Any:
    """Return an actor on a machine without reserved resources, which ends with this process."""
    make: Any = ray.remote(_Cards)
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return make.options(num_cpus=0, scheduling_strategy=here).remote()


class _Cards:
    """Reads the GPUs of its machine."""

    def __init__(self) -> None:
        self._meter = GpuMeter(GpuReader(None).read)  # all: Ray hides them from those who hold none

    def read(self) -> GpuReading:
        """Return the GPU figures."""
        return self._meter.now()
