"""The life cycle of an inference worker: started, updated, serving, and replaced when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from palestra.engine.base import Engine
from palestra.engine.pool.options import StartWorker
from palestra.engine.pool.state import PoolState, WantedPolicy
from palestra.engine.pool.worker import InferenceWorker
from palestra.errors import EngineFailure, ModelError
from palestra.terminal import problem
from palestra.waiting import cancelled, race

log = logging.getLogger("palestra.engine")
MOST_FAILURES = 5  # of one place in a row; then the pool as a whole has failed
STEADY_SECONDS = 60.0  # a worker that has served for so long ends the row
BACKOFF_SECONDS = 0.25  # before the second start in a row; doubled with each further one


class WorkerKeeper:
    """Keeps the workers of a pool running."""

    def __init__(self, state: PoolState, start: StartWorker, start_seconds: float) -> None:
        self._state, self._start, self._start_seconds = state, start, start_seconds

    async def run(self, worker: InferenceWorker) -> NoReturn:
        """Run a worker and its replacements."""
        failures = 0
        while True:
            try:
                why = await self._serve(worker)
            except EngineFailure as error:
                why = f"did not start: {error}"
            except TimeoutError:
                why = f"did not start within {self._start_seconds:g} s"
            if worker.later and not worker.has_served:
                raise EngineFailure(f"{worker.name} {why}")
            # Without its start, which takes a server longer than that.
            served = 0.0 if worker.served_since is None else time.monotonic() - worker.served_since
            failures = 1 if served > STEADY_SECONDS else failures + 1
            if failures >= MOST_FAILURES:
                raise EngineFailure(f"{worker.name} {why} (the last of {failures} failures in a row)")
            worker.restarts += 1
            pause = BACKOFF_SECONDS * 2.0 ** (failures - 2) if failures > 1 else 0.0
            then = "it is used again when it answers" if worker.found else "another one is started"
            self._state.tell(f"{worker.name}{': ' if why.startswith('the ') else ' '}{why}; {then}")
            await asyncio.sleep(pause)

    async def pause(self, worker: InferenceWorker) -> None:
        """Tell one worker whether the pool is paused."""
        engine = worker.engine
        if engine is None:
            return
        try:
            with worker.answering():
                await (engine.pause() if self._state.paused else engine.resume())
        except EngineFailure as error:
            worker.lose(f"could not be paused: {error}")

    async def _serve(self, worker: InferenceWorker) -> str:
        """Start a worker and let it serve; return why it ended."""
        worker.served_since = None
        async with asyncio.timeout(self._start_seconds):
            started = await self._start(worker.number)
        worker.begin(started)
        try:
            failing = asyncio.create_task(_failure_of(started.engine))
            failing.add_done_callback(lambda done: None if done.cancelled() else worker.lose(done.result()))
            try:
                winner = await race(worker.lost(), self._admitted(worker), worker.stuck(lambda: self._state.paused))
            finally:
                await cancelled(failing)
            return winner.result
        finally:
            worker.end()
            started.kill()
            await started.engine.close()
            await self._state.notify()

    async def _admitted(self, worker: InferenceWorker) -> str:
        """Bring a worker up to date, let it serve, and return the reason when it is given up."""
        paused = False
        while True:
            try:
                await worker.take(self._state.wanted)
            except ModelError as error:
                self._drop(worker.refused, error)
                continue
            if paused == self._state.paused and not worker.lacks(self._state.wanted):
                break
            paused = self._state.paused
            await self.pause(worker)
        worker.is_ready, worker.has_served, worker.served_since = True, True, time.monotonic()
        await self._state.notify()
        return await worker.lost()

    def _drop(self, refused: WantedPolicy | None, error: ModelError) -> None:
        """Remove an added policy with missing or damaged files: only its requests fail."""
        if refused is None or refused.like is None or self._state.wanted.get(refused.name) is not refused:
            raise error
        log.error("%r can't be sampled from any more: %s", refused.name, error)
        del self._state.wanted[refused.name]


async def _failure_of(engine: Engine) -> str:
    """Return when an engine has failed, and say why; or why that cannot be found out."""
    try:
        return await engine.failure()
    except Exception as error:
        log.exception("an engine could not be watched, which is a defect")
        return f"can't be watched: {problem(error)}"
