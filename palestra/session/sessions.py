"""All open sessions of a model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired, PalestraError, TooManyRequests
from palestra.schemas.records import Episode
from palestra.session.context import SessionContext
from palestra.session.plain import plain_session
from palestra.session.session import EpisodeSession


class Sessions:
    """Opens sessions, closes them when their leases end, and limits the calls in flight."""

    def __init__(self, context: SessionContext, max_waiting_calls: int) -> None:
        self.context = context
        self.in_flight = 0
        self._limit = max_waiting_calls
        self._open: dict[tuple[str, int], EpisodeSession] = {}
        self._stopped: PalestraError | None = None
        context.store.episodes.on_lease_over.append(self._lease_over)

    async def open(self, episode_id: str, fence: int) -> EpisodeSession:
        """The session of a lease, rebuilt from the store where it is not in memory; renews the lease.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is not, or no longer, the episode's.
        """
        store = self.context.store
        await store.episodes.renew(episode_id, fence)
        session = self._open.get((episode_id, fence))
        if session is None:
            episode, recorded = await store.calls.of_lease(episode_id, fence)
            if not store.leases.renew(episode_id, fence):  # it ended meanwhile
                await store.episodes.renew(episode_id, fence)  # raises the reason
            session = self._open.setdefault((episode_id, fence), EpisodeSession(self.context, episode, recorded))
        return session

    @asynccontextmanager
    async def plain(self) -> AsyncIterator[EpisodeSession]:
        """A session of one request, outside any episode; nothing of it is kept."""
        session = plain_session(self.context)
        lease = session.episode.episode_id, session.episode.fence
        self._open[lease] = session  # so that `stop` finds it
        try:
            yield session
        finally:
            self._open.pop(lease, None)
            session.terminate(EpisodeEnded("this call is over"))

    async def begin(self, episode: Episode) -> EpisodeSession:
        """The session of a lease that was granted just now, in this process: nothing is recorded under it yet.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is not the episode's any more.
        """
        await self.context.store.episodes.renew(episode.episode_id, episode.fence)
        lease = episode.episode_id, episode.fence
        session = self._open.get(lease)
        if session is None:
            session = self._open[lease] = EpisodeSession(self.context, episode, ())
        return session

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place for one call.

        Raises:
            TooManyRequests: all places are taken.
            PalestraError: what `stop` was given.
        """
        if self.in_flight >= self._limit and self._stopped is None:
            self.context.counts["calls_refused"] += 1
            raise TooManyRequests(f"{self.in_flight} calls are in flight, which is the limit; try again soon")
        with self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A place for a call of this process, which has a limit of its own.

        Raises:
            PalestraError: what `stop` was given.
        """
        if self._stopped is not None:
            raise self._stopped
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def stop(self, reason: PalestraError) -> None:
        """Take no more calls, and end those in flight; nothing of them is kept."""
        self._stopped = reason
        while self._open:
            self._open.popitem()[1].terminate(reason)

    def _lease_over(self, episode_id: str, fence: int) -> None:
        session = self._open.pop((episode_id, fence), None)
        if session is not None:
            session.terminate(EpisodeLeaseExpired(f"episode {episode_id} ended, or its lease ran out, during the call"))
