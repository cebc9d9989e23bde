"""Workers of a pool in the test's own process, which die, stand still and refuse weights when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from palestra.engine.fake import FakeEngine, digits_script
from palestra.engine.pool.manager import InferenceManager
from palestra.engine.pool.options import PoolOptions
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import EngineFailure, ModelError
from palestra.models.weights import LocalWeights


@dataclass(frozen=True)
class Kept:
    source: LocalWeights


async def keep(policy, source):
    return Kept(source)


class GlassEngine(FakeEngine):
    """A fake engine whose replies follow from seed and version, one token at a time, until it breaks."""

    def __init__(self, number, by_version=False):
        super().__init__(digits_script(12, 258), piece_tokens=1, piece_delay_seconds=0.001)
        self.number, self.by_version = number, by_version
        self.broken = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()  # set: as after SIGSTOP
        self.breaks_after = None  # tokens of a reply
        self.refuses = self.dies_in_update = self.hangs_in_update = False
        self.taken = []

    def break_now(self, why="was killed by SIGKILL"):
        if not self.broken.done():
            self.broken.set_result(why)

    async def failure(self):
        return await asyncio.shield(self.broken)

    async def _alive(self):
        if self.stopped.is_set():
            await asyncio.shield(self.broken)
        if self.broken.done():
            raise EngineFailure("the worker has died")

    async def generate(self, request):
        await self._alive()
        count = 0
        if self.by_version:
            request = self._of_version(request)
        async with contextlib.aclosing(super().generate(request)) as pieces:
            async for piece in pieces:
                if self.breaks_after == count:
                    self.break_now()
                await self._alive()
                count += 1
                yield piece

    def _of_version(self, request):
        seed = request.sampling.seed + 1000 * self.version(request.policy).n
        return replace(request, sampling=replace(request.sampling, seed=seed))

    async def sync_weights(self, policy, version, source):
        if self.dies_in_update:
            self.break_now("was killed by SIGKILL")
        if self.hangs_in_update:
            await asyncio.shield(self.broken)
        await self._alive()
        if self.refuses:
            raise ModelError("the weights do not fit")
        self.taken.append((policy, version))
        await super().sync_weights(policy, version, source)

    async def close(self):
        self.break_now("was closed")
        await super().close()


@dataclass
class Glasshouse:
    """Starts glass workers, and has all that were started."""

    by_version: bool = False
    started: list[GlassEngine] = field(default_factory=list)
    on_start: object = None  # called with each engine
    fails: list[Exception] = field(default_factory=list)  # raised by the next starts
    found: bool = False  # see `StartedWorker`

    async def start(self, number):
        if self.fails:
            raise self.fails.pop(0)
        engine = GlassEngine(number, self.by_version)
        self.started.append(engine)
        if self.on_start is not None:
            self.on_start(engine)
        return StartedWorker(engine, lambda: engine.break_now("was killed by the pool"), found=self.found)

    @property
    def alive(self):
        return [engine for engine in self.started if not engine.broken.done()]


@contextlib.asynccontextmanager
async def pool_of(house, replicas=2, check_capacity=None, **options):
    """An open pool of glass workers."""
    pool = InferenceManager(house.start, ["policy"], keep, PoolOptions(replicas=replicas, **options), check_capacity)
    await asyncio.wait_for(pool.open(), 10)
    try:
        yield pool
    finally:
        await asyncio.wait_for(pool.close(), 10)
