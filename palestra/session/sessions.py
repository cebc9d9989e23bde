"""The open sessions of a model server, by the lease of their episode, and the parts of external players in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired, PalestraError, TooManyRequests
from palestra.session.context import SessionContext
from palestra.session.request import Listener, Relay
from palestra.session.seat_table import SeatTable
from palestra.session.seats import EpisodeKey, SeatBook, SeatKey
from palestra.session.session import EpisodeSession, Session, StatelessSession
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest
from palestra.types.records import EpisodeRecord


class SeatSession:
    """An external player's part of an episode's session."""

    def __init__(self, session: EpisodeSession, table: SeatTable, role: str, fence: int) -> None:
        """Create the part. All players share `session`."""
        self._session, self._table, self._role, self._fence = session, table, role, fence
        self.delivered = session.delivered

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Sample all choices of a request; see `Session.generate`.

        The TimeStep is the pending observation's; the request's own is ignored. Raises Conflict: no observation waits
        for an action. Raises EpisodeLeaseExpired: the worker has lost its slot.
        """
        role, fence, table, session = self._role, self._fence, self._table, self._session
        number = table.turn(role, fence, request.agent)

        def note(chat: Chat) -> None:
            table.calls.note(role, fence, number, chat.index, partial(session.free_seed, chat))

        # A retry is known by the seat and its worker, too: another seat's worker may send the same body. They come
        # last, because the beginning says whether the request has a key of its own.
        request = replace(request, time_step=number, digest=f"{request.digest}/{fence}/{role}/")
        with table.calling(role, fence):
            return await session.generate(request, Relay(listener, note=note))

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens of a request; see `Session.count_tokens`."""
        self._table.renew(self._role, self._fence)
        return await self._session.count_tokens(request)


CallMaker: TypeAlias = Session | SeatSession
"""Makes the model calls of one request."""


class Sessions:
    """Opens sessions, closes them at the end of their leases, and limits running calls.

    Attributes:
        seats: the slots of external players, if any.
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
        """Return the session of a lease, restored from the store if necessary, and renew the lease. Raises
        EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is not, or no longer, the episode's.
        """
        store = self.context.store
        if not store.leases.renew(episode_id, fence):
            await store.episodes.renew(episode_id, fence)  # raises the reason
        session = self._episodes.get((episode_id, fence))
        if session is None:
            episode, recorded = await store.calls.of_lease(episode_id, fence)
            if not store.leases.renew(episode_id, fence):  # the lease ended while the calls were read
                await store.episodes.renew(episode_id, fence)  # raises the reason
            session = self._episodes.setdefault((episode_id, fence), EpisodeSession(self.context, episode, recorded))
        return session

    async def players(self, episode_id: str, fence: int) -> Mapping[str, str]:
        """Return the players of an episode's roles that have a pool."""
        session = self._episodes.get((episode_id, fence))
        episode = await self.context.store.episodes.get(episode_id) if session is None else session.episode
        return episode.players

    def stateless(self) -> StatelessSession:
        """Return an unrecorded session for one request outside episodes, which `leave` closes."""
        session = StatelessSession(self.context)
        self._stateless.add(session)  # so that `stop` can end the session
        return session

    async def begin(self, episode: EpisodeRecord) -> EpisodeSession:
        """Return the session of a lease that this process was just granted, without recorded calls. Raises
        EpisodeLeaseExpired, EpisodeEnded, NotFound: the lease is no longer the episode's.
        """
        await self.context.store.episodes.renew(episode.episode_id, episode.fence)
        lease = episode.episode_id, episode.fence
        session = self._episodes.get(lease)
        if session is None:
            session = self._episodes[lease] = EpisodeSession(self.context, episode)
        return session

    async def enter(self, caller: object) -> CallMaker:
        """Return the session for one request of a client, which is in flight until `leave`. A caller that is neither an
        `EpisodeKey` nor a `SeatKey` gets one outside episodes. Raises TooManyRequests: the limit is reached.
        """
        if self._stopped is not None:
            raise self._stopped
        if self.in_flight >= self._limit:
            self.context.counts["calls_refused"] += 1
            raise TooManyRequests(f"{self.in_flight} calls are in flight, which is the limit; try again soon")
        self.in_flight += 1
        try:
            if not isinstance(caller, EpisodeKey | SeatKey):
                return self.stateless()
            if isinstance(caller, EpisodeKey):
                return await self.open(caller.episode_id, caller.fence)
            assert self.seats is not None, "a key of a seat was checked, so the job has seats"
            table = self.seats.table(caller)
            table.renew(caller.role, caller.seat_fence)
            session = await self.open(caller.episode_id, caller.fence)
            return SeatSession(session, table, caller.role, caller.seat_fence)
        except BaseException:
            self.in_flight -= 1
            raise

    def leave(self, session: CallMaker) -> None:
        """Count a request as over, and close its session if it was for this request alone."""
        self.in_flight -= 1
        if isinstance(session, StatelessSession):
            self._stateless.discard(session)
            session.terminate(EpisodeEnded("this call is over"))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call of this process inside the block; its limits are elsewhere."""
        if self._stopped is not None:
            raise self._stopped
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def stop(self, reason: PalestraError) -> None:
        """Refuse new calls, and end running ones without recording; all raise `reason`."""
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
