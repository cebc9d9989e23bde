"""The model calls of a seat's worker: part of the episode, and of the TimeStep that the seat has to answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from palestra.session.request import CallStart, Listener, ReplyPiece
from palestra.session.seat_table import SeatTable
from palestra.session.session import EpisodeSession
from palestra.types.calls import Chat
from palestra.types.generation import GenerationRequest


class SeatSession:
    """A seat's part of an episode's session."""

    def __init__(self, session: EpisodeSession, table: SeatTable, role: str, fence: int) -> None:
        """Open a seat's part.

        Args:
            session: of the episode, which all of its seats share.
        """
        self._session, self._table, self._role, self._fence = session, table, role, fence

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Sample all choices of a request; see `Session.generate`.

        Args:
            request: of the seat, or of a subagent of it. Its TimeStep is that of the observation that waits for the
                seat's action; one that the request names is not used.

        Raises:
            Conflict: no observation waits for an action of the seat.
            EpisodeLeaseExpired: the worker does not hold the seat any more.
            PalestraError: see `Session.generate`.
        """
        number = self._table.turn(self._role, self._fence, request.agent)
        # A retry is known by the seat and its worker, too: another seat's worker may send the same body.
        digest = f"{self._role}.{self._fence}:{request.digest}"
        with self._table.calling(self._role, self._fence):
            return await self._session.generate(
                replace(request, time_step=number, digest=digest), _Noted(self, number, request, listener)
            )

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens the prompt of a request would have; see `Session.count_tokens`."""
        self._table.renew(self._role, self._fence)
        return await self._session.count_tokens(request)

    def delivered(self, chat: Chat) -> None:
        """Record that a reply was sent; see `Session.delivered`."""
        self._session.delivered(chat)

    def note(self, number: int, start: CallStart, request: GenerationRequest) -> None:
        """Note a call of this seat before it is sampled."""
        forget = partial(self._session.free_seed, start, request.policy, request.agent)
        self._table.calls.note(self._role, self._fence, number, start.index, forget)


class _Noted:
    """A listener that notes each call of a seat, and passes everything on to another listener."""

    def __init__(self, seat: SeatSession, number: int, request: GenerationRequest, listener: Listener | None) -> None:
        self._seat, self._number, self._request, self._listener = seat, number, request, listener

    def started(self, choice: int, start: CallStart) -> None:
        self._seat.note(self._number, start, self._request)
        if self._listener is not None:
            self._listener.started(choice, start)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        if self._listener is not None:
            self._listener.sampled(choice, piece)

    def finished(self, choice: int, chat: Chat) -> None:
        if self._listener is not None:
            self._listener.finished(choice, chat)
