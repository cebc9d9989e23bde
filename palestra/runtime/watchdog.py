"""The watchdog: ends a training job without progress, and names the stuck part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.config import WatchdogConfig
from palestra.engine.base import EngineLoad
from palestra.errors import JobStuck
from palestra.server import DataPlane
from palestra.types.clock import Clock
from palestra.types.progress import Counts, Part, duration

STORE_SECONDS = 30.0  # limit for the answer of the store
LOOKS = 20  # at the job, in the time after which it fails; at least one each second
NO_WORKER = "collectors: no worker plays; start one (palestra worker), or wait for one with watchdog.idle = 'wait'"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobActivity:
    """The activity of a job at one moment.

    Attributes:
        part: of the job that is active.
        phase: for people.
        collects: whether the phase waits for episodes.
        episodes: by state.
        workers: number that claim or play.
        plays_itself: whether the job's own runners play its episodes.
        holders: workers that hold episodes, the longest silent first.
    """

    part: Part
    phase: str
    collects: bool
    episodes: Counts
    workers: int
    plays_itself: bool
    engines: Sequence[EngineLoad] = ()
    holders: Sequence[str] = ()


def stuck_part(now: JobActivity) -> str | None:
    """Describe which part of a job blocks all others; None: the job is in order, and no worker plays.

    Args:
        now: taken after a long time without progress.
    """
    if now.part is Part.TASKS:
        return None
    if now.part is Part.WEIGHT_SYNC:
        return f"weight sync: the engine has not taken the new weights{_workers(now.engines, 'updating')}"
    if now.part is Part.TRAINER:
        return f"trainer: {now.phase} does not end"
    if now.part is Part.CHECKPOINT:
        return "checkpoint: it is not written"
    if not now.collects:
        return f"learner: {now.phase} does not end"
    calls = sum(load.waiting + load.running for load in now.engines)
    if calls:
        return f"engine: {calls} calls have got no token{_workers(now.engines, 'ready')}"
    episodes = now.episodes
    if episodes.claimed:
        held = f" (held by {', '.join(now.holders[:3])})" if now.holders else ""
        return f"collectors: {episodes.claimed} episodes are being played{held}, and none calls the model or ends"
    if episodes.unjudged:
        return f"judge: {episodes.unjudged} episodes wait for its verdict"
    if not episodes.registered:
        return f"learner: {now.phase} waits for episodes, and none is open"
    if now.plays_itself:
        return f"collectors: the job's own runners claim none of {episodes.registered} open episodes"
    if now.workers:
        return f"collectors: {now.workers} workers are connected, and hold none of {episodes.registered} open episodes"
    return None


def _workers(engines: Sequence[EngineLoad], state: str) -> str:
    """Return the workers of pools that are in a state, or have not started, as the end of a sentence."""
    workers = [worker for load in engines for worker in load.workers]
    found = [f"{worker.name} is {worker.state}" for worker in workers if worker.state in (state, "starting")]
    return f" ({', '.join(found)})" if found else ""


class Watchdog:
    """Watches one training job."""

    def __init__(self, config: WatchdogConfig, plane: DataPlane, plays_itself: bool, clock: Clock) -> None:
        """Prepare; `run` watches.

        Args:
            plane: its tokens, steps and workers are watched.
            plays_itself: whether the job's own runners play its episodes.
        """
        self._config, self._plane, self._plays_itself, self._clock = config, plane, plays_itself, clock

    async def run(self) -> None:
        """Watch until the job has been stuck for too long; a disabled watchdog never returns.

        Raises:
            JobStuck: no progress for `seconds`; the message names the stuck part.
        """
        if not self._config.seconds:
            await asyncio.Event().wait()
        seen, since = self._done(), self._clock.monotonic()
        while True:
            await asyncio.sleep(min(self._config.seconds / LOOKS, 1.0))
            done, now = self._done(), self._clock.monotonic()
            if done != seen:
                seen, since = done, now
            elif now - since >= self._config.seconds:
                if (why := await self._why()) is None and self._config.idle == "wait":
                    since = now  # nothing of it is the job's fault
                    continue
                raise JobStuck(
                    f"no token was accepted and no step was finished for {duration(now - since)}; stuck: "
                    f"{why or NO_WORKER} (watchdog.seconds = {self._config.seconds:g})"
                )

    def _done(self) -> tuple[int, int]:
        """Return numbers that grow with every accepted token and every step."""
        return self._plane.sessions.context.counts["completion_tokens"], self._plane.progress.step

    async def _why(self) -> str | None:
        """Return which part is stuck, possibly the store; see `stuck_part`."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                return stuck_part(await self._situation())
        except TimeoutError:
            return "store: the database does not answer"

    async def _situation(self) -> JobActivity:
        plane, progress = self._plane, self._plane.progress
        return JobActivity(
            part=progress.part,
            phase=progress.phase,
            collects=progress.collecting is not None,
            episodes=await plane.store.episodes.counts(),
            workers=plane.workers.busy,
            plays_itself=self._plays_itself,
            engines=plane.sessions.context.policies.engine_loads,
            holders=[holder.worker_id for holder in plane.store.leases.holders(3)],
        )
