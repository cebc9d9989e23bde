"""What a job is doing, in a line for people: how far a phase is, and for whom it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.ledger.leases import Holder
from palestra.schemas.progress import Collected, duration

if TYPE_CHECKING:
    from palestra.cluster.local import LocalJob

STALLED_SECONDS = 60.0  # without any progress; then the line says who holds the episodes
SHOWN_HOLDERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A look at a job."""

    phase: str
    step: int  # steps that are done
    steps: int
    collected: (
        Collected | None
    )  # how far the phase's episodes are; None: it waits for none, or they are not counted yet
    claimed: int = 0  # episodes that somebody holds
    calls: int = 0  # model calls that were answered since the start
    busy_workers: int = 0  # that ask for an episode or play one now
    known_workers: int = 0
    plays_itself: bool = False  # whether this process plays the episodes
    seconds_left: float | None = None

    @property
    def waits_for_workers(self) -> bool:
        """Whether there are episodes, and no worker that would play them."""
        left = self.collected is not None and self.collected.done < self.collected.due
        return left and not (self.claimed or self.busy_workers or self.plays_itself)

    @property
    def moved(self) -> tuple[object, ...]:
        """What changes when the job makes progress, or when the wait for workers begins or ends."""
        # A worker that comes after a long wait is not to be shown as one that has made no progress for all that time.
        return (self.phase, self.step, self.collected, self.calls, self.waits_for_workers)


def situation_of(job: LocalJob) -> Situation:
    """Look at a job; from any thread."""
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


def describe(now: Situation, still_seconds: float, holders: Sequence[Holder] = ()) -> str:
    """Return the line that says what a job is doing.

    Args:
        now: the look at it.
        still_seconds: for how long it has made no progress.
        holders: who holds its episodes; said after STALLED_SECONDS.
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
    if now.seconds_left is not None:
        text += f", about {clock(now.seconds_left)} left"
    return text


def held_by(holders: Sequence[Holder]) -> str:
    """Say who holds how many episodes, since when, and when something of them was last heard."""
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
    """Return a time span as `1:05` or `2:00:07`."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d}"


class PlainLines:
    """Decides when a line is worth being written where no terminal shows what is going on.

    A line that says something new comes PLAIN_SECONDS after the last line of any kind at the earliest; the same one
    again after REPEAT_SECONDS, then after twice as long each time.
    """

    PLAIN_SECONDS = 10.0
    REPEAT_SECONDS = 30.0
    MOST_SECONDS = 600.0

    def __init__(self, now: float) -> None:
        """`now`: monotonic seconds."""
        self._at, self._repeat = now, self.REPEAT_SECONDS
        self._news: object = None

    def wrote(self, now: float) -> None:
        """Another line was written."""
        self._at, self._repeat = now, self.REPEAT_SECONDS

    def due(self, news: object, now: float) -> bool:
        """Whether a line is to be written now; equal `news` are no news."""
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
