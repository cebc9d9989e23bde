"""`RunnerPool`: plays all episodes that a job has to play, until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import traceback
import uuid
from collections.abc import AsyncIterator

from palestra.database import WAKE_SECONDS
from palestra.errors import EpisodeForfeited, RolloutFailed, place_of
from palestra.rollout.orchestrator import RolloutOrchestrator, WorkOutcome
from palestra.rollout.result import EpisodeResult, Lost, Termination
from palestra.runners.runner import Runner
from palestra.session import Sessions
from palestra.types.progress import RolloutProgress
from palestra.types.records import EpisodeRecord

log = logging.getLogger("palestra.rollout")
FAILURES_IN_A_ROW = 20
OF_WORKERS = (Termination.SEAT_LOST, Termination.SEAT_UNCLAIMED)  # failures that say nothing about this process
# Failures that a worker of a seat may bring about, by an action that the environment can't take, or by none.
PERHAPS_OF_WORKERS = (Termination.AGENT_FAILED, Termination.ENVIRONMENT_FAILED, Termination.TIMED_OUT)


class RunnerPool:
    """Plays up to `max_concurrency` episodes concurrently, of every kind that can be claimed (training, validation)."""

    def __init__(
        self,
        sessions: Sessions,
        runner: Runner,
        *,
        max_concurrency: int,
        progress: RolloutProgress | None = None,
    ) -> None:
        """Create a pool; `run` plays. `progress`: live counts to update, for the status page; None: new ones."""
        self._store, self._runner = sessions.context.store, runner
        self._seats = sessions.seats
        self.progress = progress or RolloutProgress()
        self._max_concurrency = max_concurrency
        self._unplayed: dict[str, EpisodeRecord] = {}  # claimed and waiting for their turn
        self._claiming = asyncio.Lock()
        self._free = asyncio.Event()
        if self._seats is not None:
            self._seats.on_wanted.append(self._free.set)
        self._in_a_row = 0  # failures without a success between them
        self._ended_well = False  # whether any episode has ended in good order
        self._logged: set[tuple[type[BaseException], str, int | None, str]] = set()  # of causes; see `_unseen`

    async def run(self) -> None:
        """Play episodes until cancelled, which releases running episodes."""
        for episode in await self._store.episodes.claimed_by(self._runner.worker_id):
            await self._runner.give_back(episode, Termination.CANCELLED, "the server was started again")
        orchestrator = RolloutOrchestrator(self._play, max_concurrency=self._max_concurrency)
        async with self._runner:
            producing = asyncio.ensure_future(orchestrator.run_producers_from_stream(self._claims()))
            try:
                async for outcomes in orchestrator.yield_batches(1):
                    for outcome in outcomes:
                        self._count(outcome)
                await producing  # raises the store's error, if one ended the stream of claims
            finally:
                producing.cancel()
                await asyncio.gather(producing, return_exceptions=True)
                await asyncio.shield(self._give_back_unplayed())

    async def _claims(self) -> AsyncIterator[EpisodeRecord]:
        """Yield episodes as positions become free; one with external players only when a worker waits for one."""
        while True:
            seen = self._store.episodes.available.count
            self._free.clear()
            free = self._max_concurrency - self.progress.playing - len(self._unplayed)
            if self._seats is not None:
                free = min(free, self._seats.wanted)
            claimed = await asyncio.shield(self._claim(free))
            for episode in claimed:
                yield episode
            if not free:
                await self._free.wait()
            elif len(claimed) < free:
                await self._store.episodes.available.wait(WAKE_SECONDS, seen)

    async def _claim(self, free: int) -> list[EpisodeRecord]:
        """Claim up to `free` episodes; callers shield this from cancellation, so that all can be released."""
        async with self._claiming:
            claimed = (
                await self._store.episodes.claim_many(self._runner.worker_id, uuid.uuid4().hex, free) if free else []
            )
            self._unplayed |= {episode.episode_id: episode for episode in claimed}
            if self._seats is not None:
                for episode in claimed:
                    self._seats.open(episode)
            return claimed

    async def _play(self, episode: EpisodeRecord) -> EpisodeResult:
        del self._unplayed[episode.episode_id]
        self.progress.playing += 1
        try:
            return await self._runner.play_claim(episode)
        finally:
            self.progress.playing -= 1
            self._free.set()

    def _count(self, outcome: WorkOutcome[EpisodeRecord, EpisodeResult]) -> None:
        error, episode = outcome.error, outcome.work
        name = f"{episode.episode_id} (task {episode.task.task_id})"
        if error is None:
            assert outcome.result is not None
            self.progress.terminations[outcome.result.termination.value] += 1
            if (forfeited := outcome.result.forfeited) is not None:
                self._count_forfeit(name, episode, forfeited)
                return
            self._in_a_row, self._ended_well = 0, True
            return
        if isinstance(error, Lost):
            self.progress.terminations["lease_lost"] += 1
            log.warning("%s", error)
            return
        if not isinstance(error, RolloutFailed):
            raise error
        self.progress.terminations[error.termination] += 1
        self._in_a_row += not self._is_of_workers(episode, error)
        log.warning("episode %s: %s: %s", name, error.termination, error, exc_info=self._unseen(error.__cause__))
        self._check_in_a_row(name, error)

    def _count_forfeit(self, name: str, episode: EpisodeRecord, error: EpisodeForfeited) -> None:
        """Log a forfeit. Exceptions in every episode from the first on are an environment that cannot be played."""
        log.warning("episode %s: forfeit: %s", name, error, exc_info=self._unseen(error.__cause__))
        if error.__cause__ is None or self._ended_well:
            return
        failed = RolloutFailed(Termination.ENVIRONMENT_FAILED, str(error))
        self._in_a_row += not self._is_of_workers(episode, failed)
        self._check_in_a_row(name, failed)

    def _check_in_a_row(self, name: str, error: RolloutFailed) -> None:
        """Raise `RolloutFailed` when `FAILURES_IN_A_ROW` episodes in a row have failed, `name` with `error`."""
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise RolloutFailed(
                error.termination, f"{self._in_a_row} episodes in a row failed, the last one, {name}, with {error}"
            ) from error

    def _unseen(self, cause: BaseException | None) -> BaseException | None:
        """Return an episode's exception if none of its type and lines was logged yet, else None."""
        if cause is None or cause.__traceback__ is None:
            return cause
        last = traceback.extract_tb(cause.__traceback__)[-1]
        place = (type(cause), last.filename, last.lineno, place_of(cause))
        known = place in self._logged
        self._logged.add(place)
        return None if known else cause

    def _is_of_workers(self, episode: EpisodeRecord, error: RolloutFailed) -> bool:
        """Return whether workers of other processes may be to blame for a failure, who must not end the job."""
        if error.termination in OF_WORKERS:
            return True
        return error.termination in PERHAPS_OF_WORKERS and self._seats is not None and self._seats.was_held(episode)

    async def _give_back_unplayed(self) -> None:
        async with self._claiming:
            for episode in self._unplayed.values():
                await self._runner.give_back(episode, Termination.CANCELLED, "the job was stopped")
            self._unplayed.clear()
