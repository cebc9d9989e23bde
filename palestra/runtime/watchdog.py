"""A job's present situation, and the watchdog that ends a training job in which nothing happens any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.config import WatchdogConfig
from palestra.engine.base import EngineLoad
from palestra.errors import JobStuck
from palestra.server import DataPlane
from palestra.types.clock import Clock
from palestra.types.progress import Counts, Part, PhaseProgress, duration
from palestra.types.wire import EpisodeHolder

if TYPE_CHECKING:
    from palestra.runtime.local_job import LocalJob

STALLED_SECONDS = 60.0  # without progress for so long, the line names the holders of episodes
SHOWN_HOLDERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state of a job at one moment.

    Attributes:
        collected: progress of the phase's episodes; None: it has none, or they are not counted yet.
        calls: model calls answered since the start.
        plays_itself: whether this process plays the episodes.
        seconds_left: estimated time until the last step is done; None: unknown.
    """

    phase: str
    step: int
    steps: int
    collected: PhaseProgress | None
    claimed: int = 0
    calls: int = 0
    busy_workers: int = 0
    known_workers: int = 0
    plays_itself: bool = False
    seconds_left: float | None = None

    @property
    def waits_for_workers(self) -> bool:
        """Return whether episodes are waiting, and no worker plays or claims them."""
        left = self.collected is not None and self.collected.done < self.collected.due
        return left and not (self.claimed or self.busy_workers or self.plays_itself)

    @property
    def moved(self) -> tuple[object, ...]:
        """Return values that change with the job's progress, or when waiting for workers begins or ends."""
        # The wait for workers is part of it, so that a worker that arrives after a long wait does not show as stalled.
        return (self.phase, self.step, self.collected, self.calls, self.waits_for_workers)


def situation_of(job: LocalJob) -> Situation:
    """Return the job's present situation; thread-safe."""
    plane, progress = job.plane, job.progress
    return Situation(
        phase=progress.phase,
        step=progress.step,
        steps=progress.steps,
        collected=progress.collected,
        claimed=len(plane.store.leases),
        calls=int(plane.sessions.context.counts["calls"]),
        busy_workers=plane.workers.busy,
        known_workers=len(plane.workers),
        plays_itself=job.plays_itself,
        seconds_left=progress.seconds_left,
    )


def describe_situation(now: Situation, still_seconds: float, holders: Sequence[EpisodeHolder] = ()) -> str:
    """Describe a job's present activity in one line. `still_seconds`: how long the job has made no progress. `holders`:
    of its episodes, named after STALLED_SECONDS.
    """
    text = now.phase
    if now.collected is not None:
        text += f": {now.collected.done:,} of {now.collected.due:,} episodes"
    if now.waits_for_workers:
        text += ", waiting for workers: "
        text += "none is connected now" if now.known_workers else "none has asked for an episode yet"
    elif now.collected is not None and still_seconds >= STALLED_SECONDS:
        text += f", no progress for {duration(still_seconds)}"
        text += f"; held: {held_by(holders)}" if holders else ""
    if now.seconds_left is not None and now.seconds_left >= 1:  # the last evaluation is no part of the estimate
        text += f", about {clock(now.seconds_left)} left"
    return text


def held_by(holders: Sequence[EpisodeHolder]) -> str:
    """Describe the workers with most episodes: how many, for how long, and the last sign of life."""
    count = Counter(holder.worker_id for holder in holders)
    parts = []
    for worker, number in count.most_common(SHOWN_HOLDERS):
        of = [holder for holder in holders if holder.worker_id == worker]
        since, heard = max(h.claimed_seconds for h in of), max(h.heard_seconds for h in of)
        parts.append(
            f"{number} episode{'s' if number > 1 else ''} by worker {worker} for {duration(since)}"
            + (", a call is in flight" if heard == 0 else f", last heard {duration(heard)} ago")
        )
    rest = len(count) - SHOWN_HOLDERS
    return "; ".join(parts) + (f"; and {rest} other workers" if rest > 0 else "")


def clock(seconds: float) -> str:
    """Return a duration as text: `1:05` or `2:00:07`."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d}"


class PlainLines:
    """Decides when to write a line about the situation if no terminal shows it continuously.

    A line with news comes at least PLAIN_SECONDS after the last line of any kind. An unchanged line is repeated after
    REPEAT_SECONDS, then after twice as long each time.
    """

    PLAIN_SECONDS = 10.0
    REPEAT_SECONDS = 30.0
    MOST_SECONDS = 600.0

    def __init__(self, now: float) -> None:
        """Start at the time `now`, in monotonic seconds."""
        self._at, self._repeat = now, self.REPEAT_SECONDS
        self._news: object = None

    def wrote(self, now: float) -> None:
        """Record that another line was written at the time `now`."""
        self._at, self._repeat = now, self.REPEAT_SECONDS

    def due(self, news: object, now: float) -> bool:
        """Return whether to write a line now. `news`: a value that differs from that of the last line if there are
        news. `now`: monotonic seconds.
        """
        since = now - self._at
        if news == self._news:
            if since < self._repeat:
                return False
            self._repeat = min(2 * self._repeat, self.MOST_SECONDS)
        elif since < self.PLAIN_SECONDS:
            return False
        else:
            self._repeat = self.REPEAT_SECONDS
        self._at, self._news = now, news
        return True


STORE_SECONDS = 30.0  # limit for the answer of the store
LOOKS = 20  # at the job, in the time after which it fails; at least one each second


@dataclass(frozen=True, kw_only=True, slots=True)
class JobActivity:
    """The activity of a job at one moment.

    Attributes:
        plays_itself: whether the job's own runners play its episodes.
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
    """Describe which part of a job blocks all others; None: the job is in order, and no worker plays. `now`: taken
    after a long time without progress.
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
        """Prepare; `run` watches. `plays_itself`: whether the job's own runners play its episodes."""
        self._config, self._plane, self._plays_itself, self._clock = config, plane, plays_itself, clock

    async def run(self) -> None:
        """Watch until the job has been stuck for too long; a disabled watchdog never returns. Raises JobStuck after
        `stuck_seconds` without progress; the message names the stuck part.
        """
        if not self._config.stuck_seconds:
            await asyncio.Event().wait()
        seen, since = self._done(), self._clock.monotonic()
        while True:
            await asyncio.sleep(min(self._config.stuck_seconds / LOOKS, 1.0))
            done, now = self._done(), self._clock.monotonic()
            if done != seen:
                seen, since = done, now
            elif now - since >= self._config.stuck_seconds:
                if (why := await self._why()) is None:
                    since = now  # nothing of it is the job's fault
                    continue
                raise JobStuck(
                    f"no token was accepted, no verdict given and no step finished for {duration(now - since)}; stuck: "
                    f"{why} (watchdog.stuck_seconds = {self._config.stuck_seconds:g})"
                )

    def _done(self) -> tuple[int, int, int]:
        """Return numbers that grow with every accepted token, every step and every verdict."""
        store = self._plane.store
        tokens, verdicts = (
            self._plane.sessions.context.counts["completion_tokens"],
            store.verdicts.recorded + store.audits.recorded,
        )
        return tokens, self._plane.progress.step, verdicts

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
