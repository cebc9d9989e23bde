"""The open sessions of a model server, by the lease of their episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired, PalestraError, TooManyRequests
from palestra.session.context import SessionContext
from palestra.session.seats import SeatBook
from palestra.session.session import EpisodeSession, StatelessSession
from palestra.types.records import EpisodeRecord


class Sessions:
    """Opens sessions, closes them when their leases end, and limits the calls in flight.

    Attributes:
        context: the objects that all sessions share.
        in_flight: how many calls are being answered now.
        seats: of the episodes that the server plays; None: the job has none.
    """

    def __init__(self, context: SessionContext, max_waiting_calls: int, seats: SeatBook | None = None) -> None:
        self.context, self.seats = context, seats
        self.in_flight = 0
        self._limit = max_waiting_calls
        self._episodes: dict[tuple[str, int], EpisodeSession] = {}  # by lease
        self._stateless: set[StatelessSession] = set()
        self._stopped: PalestraError | None = None
        context.store.episodes.on_lease_over.append(self._lease_over)

    async def open(self, episode_id: str, fence: int) -> EpisodeSession:
        """Return the session of a lease, rebuilt from the store if it is not in memory, and renew the lease.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is not the episode's, or not any more.
        """
        store = self.context.store
        await store.episodes.renew(episode_id, fence)
        session = self._episodes.get((episode_id, fence))
        if session is None:
            episode, recorded = await store.calls.of_lease(episode_id, fence)
            if not store.leases.renew(episode_id, fence):  # the lease ended while the calls were read
                await store.episodes.renew(episode_id, fence)  # raises the reason
            session = self._episodes.setdefault((episode_id, fence), EpisodeSession(self.context, episode, recorded))
        return session

    async def players(self, episode_id: str, fence: int) -> Mapping[str, str]:
        """Return who plays the roles of an episode that have a pool, by the role.

        Raises:
            NotFound: there is no such episode.
        """
        if not self.context.policies.roles.pools:
            return {}
        session = self._episodes.get((episode_id, fence))
        episode = await self.context.store.episodes.get(episode_id) if session is None else session.episode
        return episode.players

    @asynccontextmanager
    async def stateless(self) -> AsyncIterator[StatelessSession]:
        """Open a session for one request outside any episode; nothing of it is kept."""
        session = StatelessSession(self.context)
        self._stateless.add(session)  # so that `stop` can end the session
        try:
            yield session
        finally:
            self._stateless.discard(session)
            session.terminate(EpisodeEnded("this call is over"))

    async def begin(self, episode: EpisodeRecord) -> EpisodeSession:
        """Return the session of a lease that this process has just been granted, under which nothing is recorded yet.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is not the episode's any more.
        """
        await self.context.store.episodes.renew(episode.episode_id, episode.fence)
        lease = episode.episode_id, episode.fence
        session = self._episodes.get(lease)
        if session is None:
            session = self._episodes[lease] = EpisodeSession(self.context, episode)
        return session

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count one call of a client while the block runs, and refuse it if too many are in flight.

        Raises:
            TooManyRequests: the limit is reached.
            PalestraError: the reason that `stop` was given.
        """
        if self.in_flight >= self._limit and self._stopped is None:
            self.context.counts["calls_refused"] += 1
            raise TooManyRequests(f"{self.in_flight} calls are in flight, which is the limit; try again soon")
        with self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one call of this process while the block runs. Such calls are limited elsewhere.

        Raises:
            PalestraError: the reason that `stop` was given.
        """
        if self._stopped is not None:
            raise self._stopped
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def stop(self, reason: PalestraError) -> None:
        """Take no more calls, and end those in flight; nothing of them is kept, and all raise `reason`."""
        self._stopped = reason
        if self.seats is not None:
            self.seats.stop(reason)
        for session in [*self._episodes.values(), *self._stateless]:
            session.terminate(reason)
        self._episodes.clear()
        self._stateless.clear()

    def _lease_over(self, episode_id: str, fence: int) -> None:
        """End the session of a lease that is over."""
        session = self._episodes.pop((episode_id, fence), None)
        if session is not None:
            session.terminate(EpisodeLeaseExpired(f"episode {episode_id} ended, or its lease ran out, during the call"))
