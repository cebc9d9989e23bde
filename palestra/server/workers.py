"""Tracks connected workers, so that the server stays up until each has been notified that the job is finished."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from palestra.types.clock import Clock

FORGOTTEN_SECONDS = 60.0  # a worker that has neither claimed nor played for so long counts as gone
# A limit on idle workers: clients choose the names, and a client that sends a new one each time must not fill memory.
MOST_RESTING = 4096


@dataclass(slots=True)
class _Worker:
    seen_at: float
    claiming: set[str] = field(default_factory=set)  # request ids of waiting claims
    playing: set[tuple[str, int]] = field(default_factory=set)  # (episode id, fence)
    notified: set[str] = field(default_factory=set)  # request ids of claims answered `finished`; at most `loops`
    loops: int = 0

    def count_loops(self) -> None:
        self.loops = max(self.loops, len(self.claiming) + len(self.playing))


class WorkerRegistry:
    """Tracks connected workers, so that the server stays up until all know that the job is finished.

    One worker name may stand for several concurrent loops (threads, tasks), all of which have to be notified. A loop
    claims or plays one episode at a time, so the largest number of simultaneous claims and episodes of a worker is its
    number of loops. Disconnected workers are removed, and the longest idle ones if there are too many.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._resting: OrderedDict[str, float] = OrderedDict()  # idle workers and since when, longest idle first
        self._players: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        """Return the number of known workers."""
        return len(self._workers)

    @property
    def busy(self) -> int:
        """Return how many workers are claiming or playing an episode now."""
        return len(self._workers) - len(self._resting)

    def mark_claiming(self, worker_id: str, request_id: str) -> None:
        """Record that a worker's claim has arrived."""
        worker = self._busy(worker_id)
        worker.seen_at = self._clock.monotonic()
        worker.claiming.add(request_id)
        worker.count_loops()

    def mark_answered(self, worker_id: str, request_id: str) -> None:
        """Record that a claim was answered, or that its connection was lost."""
        worker = self._workers.get(worker_id)
        if worker is not None:  # not forgotten meanwhile
            worker.claiming.discard(request_id)
            self._rest(worker_id)

    def mark_playing(self, worker_id: str, episode_id: str, fence: int) -> None:
        """Record that a worker's claim got an episode."""
        worker = self._busy(worker_id)
        worker.playing.add((episode_id, fence))
        worker.count_loops()
        self._players[episode_id, fence] = worker_id

    def mark_finished(self, episode_id: str, fence: int) -> None:
        """Record that a worker ended its episode, or gave it back; the worker will claim another."""
        worker = self._stops_playing(episode_id, fence)
        if worker is not None:
            worker.seen_at = self._clock.monotonic()

    def mark_lease_over(self, episode_id: str, fence: int) -> None:
        """Record that a lease expired; its loop is no longer waited for, but may claim again."""
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

    def forget(self, worker_id: str) -> None:
        """Remove a worker that has ended for good; unknown ones are ignored."""
        self._resting.pop(worker_id, None)
        worker = self._workers.pop(worker_id, None)
        for played in () if worker is None else worker.playing:
            del self._players[played]

    def mark_notified(self, worker_id: str, request_id: str) -> None:
        """Record that a claim was answered with `finished`."""
        worker = self._workers.get(worker_id)
        if worker is not None and len(worker.notified) < worker.loops:
            worker.notified.add(request_id)

    def _busy(self, worker_id: str) -> _Worker:
        self._resting.pop(worker_id, None)
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(self._clock.monotonic())
        return worker

    def _rest(self, worker_id: str) -> None:
        """Note that a worker is idle now, if it is, and forget workers that have been idle for too long."""
        worker, now = self._workers[worker_id], self._clock.monotonic()
        if worker.claiming or worker.playing:
            return
        self._resting[worker_id] = now
        while True:
            longest, since = next(iter(self._resting.items()))
            if since > now - FORGOTTEN_SECONDS and len(self._resting) <= MOST_RESTING:
                return
            del self._resting[longest], self._workers[longest]

    @property
    def all_notified(self) -> bool:
        """Return whether every connected loop knows that the job is finished."""
        gone = self._clock.monotonic() - FORGOTTEN_SECONDS
        return all(len(w.notified) >= w.loops for w in self._workers.values() if w.playing or w.seen_at > gone)
