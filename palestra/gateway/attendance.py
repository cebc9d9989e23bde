"""Who plays: so that at the end of a job all who are there hear of it before the server goes away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from palestra.schemas.clock import Clock

FORGOTTEN_SECONDS = 60.0  # without a claim and without an episode in play: that worker is gone
MOST_RESTING = 4096  # workers that neither ask nor play; the names come from clients, who may send ever new ones


@dataclass(slots=True)
class _Worker:
    seen_at: float
    asking: set[str] = field(default_factory=set)  # request ids of the claims that wait
    playing: set[tuple[str, int]] = field(default_factory=set)  # (episode id, fence)
    told: set[str] = field(default_factory=set)  # request ids of claims answered `finished`; no more than `loops`
    loops: int = 0

    def count(self) -> None:
        self.loops = max(self.loops, len(self.asking) + len(self.playing))


class Attendance:
    """One name may stand for many loops that play side by side (threads, tasks), and each has to be told.

    A loop either asks for an episode or plays one, so the most that a worker ever did of both at the same time is the
    number of its loops. A worker that is gone is forgotten, and so are the first to rest where there are too many.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._resting: OrderedDict[str, float] = (
            OrderedDict()
        )  # since when, longest first; those of `_workers` that do nothing now
        self._players: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        """Workers that are known."""
        return len(self._workers)

    @property
    def busy(self) -> int:
        """Workers that ask for an episode or play one now."""
        return len(self._workers) - len(self._resting)

    def asks(self, worker_id: str, request_id: str) -> None:
        """A claim has come in."""
        worker = self._busy(worker_id)
        worker.seen_at = self._clock.monotonic()
        worker.asking.add(request_id)
        worker.count()

    def leaves(self, worker_id: str, request_id: str) -> None:
        """The claim is answered, or its connection is lost."""
        self._busy(worker_id).asking.discard(request_id)
        self._rest(worker_id)

    def plays(self, worker_id: str, episode_id: str, fence: int) -> None:
        """A claim got an episode."""
        worker = self._busy(worker_id)
        worker.playing.add((episode_id, fence))
        worker.count()
        self._players[episode_id, fence] = worker_id

    def hands_in(self, episode_id: str, fence: int) -> None:
        """Its player ends the episode, or gives it back; it will ask for another."""
        worker = self._stops_playing(episode_id, fence)
        if worker is not None:
            worker.seen_at = self._clock.monotonic()

    def lease_over(self, episode_id: str, fence: int) -> None:
        """Nothing was heard of its player for so long that it is not waited for; if it comes back, it asks again."""
        worker = self._stops_playing(episode_id, fence)
        if worker is not None:
            worker.loops -= 1

    def _stops_playing(self, episode_id: str, fence: int) -> _Worker | None:
        worker_id = self._players.pop((episode_id, fence), None)
        if worker_id is None:
            return None
        worker = self._busy(worker_id)
        worker.playing.discard((episode_id, fence))
        self._rest(worker_id)
        return worker

    def told(self, worker_id: str, request_id: str) -> None:
        """The claim was answered `finished`."""
        worker = self._workers.get(worker_id)
        if worker is not None and len(worker.told) < worker.loops:
            worker.told.add(request_id)

    def _busy(self, worker_id: str) -> _Worker:
        self._resting.pop(worker_id, None)
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(self._clock.monotonic())
        return worker

    def _rest(self, worker_id: str) -> None:
        """Note that a worker does nothing now, if so, and forget those that have rested for too long."""
        worker, now = self._workers[worker_id], self._clock.monotonic()
        if worker.asking or worker.playing:
            return
        self._resting[worker_id] = now
        while True:
            longest, since = next(iter(self._resting.items()))
            if since > now - FORGOTTEN_SECONDS and len(self._resting) <= MOST_RESTING:
                return
            del self._resting[longest], self._workers[longest]

    @property
    def complete(self) -> bool:
        """Whether every loop that is still there has been told."""
        gone = self._clock.monotonic() - FORGOTTEN_SECONDS
        return all(len(w.told) >= w.loops for w in self._workers.values() if w.playing or w.seen_at > gone)
