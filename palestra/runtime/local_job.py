"""`LocalJob`: a running job of this process, from `run` to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn

from palestra.client.protocol import LONGEST_PAUSE_SECONDS
from palestra.engine.base import WorkerPool
from palestra.errors import EngineFailure, PalestraError, StoreError
from palestra.learner import Learner, OpenRun
from palestra.runners import RunnerPool
from palestra.runtime.judging import Judging
from palestra.runtime.renewal import Renewal
from palestra.runtime.runner_fleet import RunnerFleet
from palestra.runtime.serving import Scoring, Serving
from palestra.runtime.spending import BudgetWatch
from palestra.runtime.watchdog import Watchdog
from palestra.server import DataPlane
from palestra.session import SeatBook
from palestra.store import RunStore
from palestra.store.run_store import remove_unnamed_pictures
from palestra.types.progress import JobProgress, Phase, PhaseProgress
from palestra.types.states import STUCK, JobState
from palestra.waiting import LoggedOnce, cancelled, race

log = logging.getLogger("palestra")


SWEEP_SECONDS = 600.0  # between two looks for pictures that nothing needs


@asynccontextmanager
async def looked_after(
    store: RunStore, progress: JobProgress, seats: SeatBook | None, timeout_seconds: float
) -> AsyncIterator[None]:
    """Expire leases, count episodes, and remove unused pictures while the block is open."""

    async def watch() -> None:
        counted: tuple[int, Phase | None] = (-1, None)
        trouble = LoggedOnce(log, "leases can't be looked after now", Exception)
        while True:
            await asyncio.sleep(0.5)
            with trouble.attempt():
                await store.episodes.expire_leases()
                if seats is not None:
                    seats.expire()
                if counted != (store.db.commits, progress.collecting):
                    counted = (store.db.commits, progress.collecting)
                    await _count(store, progress)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await remove_unnamed_pictures(store, timeout_seconds)
            except (PalestraError, OSError) as error:  # a disk that is gone for a while, perhaps: try again
                log.error("pictures that nothing needs can't be removed now: %s", error)

    tasks = asyncio.create_task(watch()), asyncio.create_task(sweep())
    try:
        yield
    finally:
        await cancelled(*tasks)


async def _count(store: RunStore, progress: JobProgress) -> None:
    """Update the counts of episodes in `progress`."""
    progress.episodes = await store.episodes.counts()
    if (wanted := progress.collecting) is not None:
        found = PhaseProgress(*await store.groups.settled_of_step(wanted.kind, wanted.step))
        if progress.collecting == wanted:  # the same phase as before the query
            # Groups that are replaced, since they teach nothing, are not settled any more: that is no way back.
            before = 0 if progress.collected is None else progress.collected.done
            progress.collected = replace(found, done=min(max(found.done, before), found.due))


LINGER_SECONDS = 10.0  # limit for notifying workers that the job is over
CLOSE_SECONDS = 120.0  # limit for ending what is stuck, the engine, and the trainer
RETURN_SECONDS = LONGEST_PAUSE_SECONDS + 0.5  # after a restart, all earlier workers have retried within this time


class LocalJob:
    """A running job, with its owner's view and controls."""

    def __init__(
        self,
        run: OpenRun,
        work: Learner | Serving | Scoring,
        plane: DataPlane,
        url: str,
        player: RunnerPool | RunnerFleet | None,
        renewal: Renewal | None,
        judging: Judging | None = None,
    ) -> None:
        """Assemble a job; `run` runs it.

        Args:
            player: plays episodes, in this process or in its own processes; None: no episodes are played here.
            renewal: restarts training after its loss; None: training ends with this process.
            judging: has episodes judged; None: the job has no judge.
        """
        self.opened, self.plane, self.url = run, plane, url
        self._work, self._player, self._renewal, self._judging = work, player, renewal, judging
        self._watchdog: Watchdog | None = None
        if isinstance(work, Learner):
            self._watchdog = Watchdog(plane.config.watchdog, plane, self.plays_itself, plane.store.clock)
        self._budget: BudgetWatch | None = None
        if run.metering is not None:
            self._budget = BudgetWatch(run.metering, run.event, self.stop, lambda: run.progress.step)
        self._stopping = False
        self._all_back_at = time.monotonic() + (RETURN_SECONDS if run.resumed else 0.0)
        self.over = asyncio.Event()  # set when `run` has ended

    @property
    def progress(self) -> JobProgress:
        """Return the job's progress, which is updated while the job runs."""
        return self.plane.progress

    @property
    def plays_itself(self) -> bool:
        """Return whether this process or its runners play the episodes."""
        return self._player is not None

    @property
    def api_key(self) -> str:
        """Return the job's present key for its data plane."""
        return self.plane.keys.job_key

    def stop(self) -> None:
        """Make the job save and end, after finishing or dropping the present step; end serving."""
        self._stopping = True
        self._work.stop()

    async def run(self) -> None:
        """Train until the steps are done, or serve until `stop`; after a failure the job's state says why."""
        try:
            await self._play_and_work()
        except PalestraError as error:
            await self._failed(error)
            raise
        finally:
            if self._budget is not None:
                await self._closed(self._budget)
            self.over.set()
            if self.plane.sessions.seats is not None:
                self.plane.sessions.seats.wake()

    async def _play_and_work(self) -> None:
        """Run the work, the runners if there are any, and the watches of engine and store; an error in one ends all."""
        parts: list[Coroutine[Any, Any, None]] = [self._work_on(), self._engine_failed(), self._store_lost()]
        if self.opened.workers is not None:
            parts.append(self._tell_of_workers(self.opened.workers))
        if self._player is not None:
            parts.append(self._player.run())
        if self._judging is not None:
            parts.append(self._judging.run())
        if self._budget is not None:
            parts.append(self._until_spent(self._budget))
        await self._unless_stuck(asyncio.ensure_future(race(*parts)))

    async def _closed(self, budget: BudgetWatch) -> None:
        try:
            await budget.close()
        except StoreError as error:  # a full disk, perhaps, which is why the job ends
            log.error("the time of the job could not be recorded: %s", error)

    async def _until_spent(self, budget: BudgetWatch) -> None:
        """Return when the time of the budget is used up, which ends all work as it is."""
        await budget.run()
        if self.opened.metering is not None and self.opened.metering.ending.is_set():  # the work is over, and says so
            await self.over.wait()
        if not self.progress.over:
            await self.opened.event("completed", {"step": self.progress.step})
        if self.progress.state is JobState.STARTING:  # a resumed job whose time was used up before
            self.progress.move(JobState.RUNNING)
        if not self.progress.over:  # the work may have completed the job meanwhile, and is closing
            self.progress.move(JobState.COMPLETED)

    async def _unless_stuck(self, work: asyncio.Future[Any]) -> None:
        """Await the work, or fail the job when the watchdog says so, abandoning work that does not end."""
        if self._watchdog is None:
            await work
            return
        watch = asyncio.create_task(self._watchdog.run())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and isinstance(stuck := watch.exception(), PalestraError):
                await self._failed(stuck)  # first, because what is stuck may not let itself be cancelled
                ending = "the job is ended, which takes up to minutes where a part of it does not answer"
                # Who waits learns it now, and not when all is closed.
                self.opened.report(STUCK, {"step": self.progress.step, "text": f"{stuck}; {ending}"})
                work.cancel()
                await asyncio.wait((work,), timeout=CLOSE_SECONDS)
                raise stuck
            await work
        except asyncio.CancelledError:
            await cancelled(work)
            raise
        finally:
            watch.cancel()

    async def _work_on(self) -> None:
        """Run the work to its end, and restart it whenever its trainer is lost."""
        renewal = self._renewal
        if renewal is None:
            await self._work.run()
        elif isinstance(self._work, Learner):
            while not await renewal.unless_lost(self._work.run()):
                self._work = await self._renewed(renewal) or self._work
                if self._stopping:
                    self._work.stop()
        else:
            await race(self._work.run(), self._renew_for_ever(renewal))

    async def _renew_for_ever(self, renewal: Renewal) -> None:
        while True:
            await renewal.base.lost()
            await self._renewed(renewal)

    async def _renewed(self, renewal: Renewal) -> Learner | None:
        """Begin again at the newest checkpoint, and record that."""
        text = f"{renewal.base.loss}; the job goes on from its newest checkpoint"
        self.progress.enter("going on from the newest checkpoint")
        await self._event(renewal.base.event_of_loss, text)
        return await renewal.renew()

    async def _tell_of_workers(self, pool: WorkerPool) -> NoReturn:
        """Record each inference worker that is lost, or does not start, where the others go on."""
        while True:
            text = await pool.next_loss()
            try:
                await self._event("engine_worker_lost", text)
            except StoreError as unrecorded:  # a full disk, perhaps, which is no reason to end the job
                log.error("%s (could not be recorded: %s)", text, unrecorded)

    async def _event(self, kind: str, text: str) -> None:
        """Record an event that is no part of the work, and say it."""
        await self.opened.event(kind, {"step": self.progress.step, "text": text})

    async def _engine_failed(self) -> None:
        """Fail the job when the engine fails: every call would fail, and the job would wait for episodes forever."""
        raise EngineFailure(await self.opened.engine.failure())

    async def _store_lost(self) -> None:
        """Fail the job when the store's file was deleted: results that are handed in would be lost."""
        raise await self.plane.store.db.lost()

    async def _failed(self, error: PalestraError) -> None:
        if self.progress.over:
            return
        try:
            # Before the state changes, so that followers of events see the reason.
            await self.plane.store.log.add_event("failed", {"reason": str(error)})
        except StoreError as unrecorded:  # a full disk, perhaps, or the same error as the failure's
            if str(unrecorded) != str(error):
                log.error("why the job failed could not be recorded: %s", unrecorded)
        finally:
            self.progress.move(JobState.FAILED, str(error))
            self.plane.store.episodes.available.notify()

    async def linger(self) -> None:
        """Wait until connected workers know that the job is over, for LINGER_SECONDS at most."""
        until = time.monotonic() + LINGER_SECONDS
        while self.progress.over and time.monotonic() < until:
            if self.plane.workers.all_notified and time.monotonic() >= self._all_back_at:
                return
            await asyncio.sleep(0.05)
