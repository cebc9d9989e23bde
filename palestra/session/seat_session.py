"""The model calls of an external player's worker, as part of the episode and of its pending TimeStep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from palestra.session.request import Listener, ReplyPiece
from palestra.session.seat_table import SeatTable
from palestra.session.session import EpisodeSession
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest


class SeatSession:
    """An external player's part of an episode's session."""

    def __init__(self, session: EpisodeSession, table: SeatTable, role: str, fence: int) -> None:
        """Create the part. All players share `session`."""
        self._session, self._table, self._role, self._fence = session, table, role, fence

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Sample all choices of a request; see `Session.generate`.

        The TimeStep is the pending observation's; the request's own is ignored. Raises Conflict: no observation waits
        for an action. Raises EpisodeLeaseExpired: the worker has lost its slot.
        """
        number = self._table.turn(self._role, self._fence, request.agent)
        # A retry is known by the seat and its worker, too: another seat's worker may send the same body. They come
        # last, because the beginning says whether the request has a key of its own.
        digest = f"{request.digest}/{self._fence}/{self._role}/"
        with self._table.calling(self._role, self._fence):
            return await self._session.generate(
                replace(request, time_step=number, digest=digest), _Noted(self, number, listener)
            )

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens of a request; see `Session.count_tokens`."""
        self._table.renew(self._role, self._fence)
        return await self._session.count_tokens(request)

    def delivered(self, *chats: Chat) -> None:
        """Mark replies as sent; see `Session.delivered`."""
        self._session.delivered(*chats)

    def note(self, number: int, chat: Chat) -> None:
        """Record a call of this player before it is sampled."""
        self._table.calls.note(self._role, self._fence, number, chat.index, partial(self._session.free_seed, chat))


class _Noted:
    """A listener that records each call of a player and forwards everything to another listener."""

    def __init__(self, seat: SeatSession, number: int, listener: Listener | None) -> None:
        self._seat, self._number, self._listener = seat, number, listener

    def started(self, choice: int, chat: Chat) -> None:
        self._seat.note(self._number, chat)
        if self._listener is not None:
            self._listener.started(choice, chat)

    def sampled(self, choice: int, piece: ReplyPiece) -> None:
        if self._listener is not None:
            self._listener.sampled(choice, piece)

    def finished(self, choice: int, chat: Chat) -> None:
        if self._listener is not None:
            self._listener.finished(choice, chat)
