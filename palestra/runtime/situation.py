"""A job's present situation as a line for people: the progress of its phase, and what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.store.leases import Holder
from palestra.types.progress import PhaseProgress, duration

if TYPE_CHECKING:
    from palestra.runtime.local_job import LocalJob

STALLED_SECONDS = 60.0  # without progress for so long, the line names the holders of episodes
SHOWN_HOLDERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state of a job at one moment.

    Attributes:
        phase: for people.
        step: number of finished steps.
        collected: progress of the phase's episodes; None: it has none, or they are not counted yet.
        claimed: episodes held by workers.
        calls: model calls answered since the start.
        busy_workers: workers that claim or play an episode now.
        known_workers: connected workers.
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


def describe_situation(now: Situation, still_seconds: float, holders: Sequence[Holder] = ()) -> str:
    """Describe what a job is doing, in one line.

    Args:
        still_seconds: how long the job has made no progress.
        holders: of its episodes, named after STALLED_SECONDS.
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


def held_by(holders: Sequence[Holder]) -> str:
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
        """Return whether to write a line now.

        Args:
            news: a value that differs from that of the last line if there are news.
            now: monotonic seconds.
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
