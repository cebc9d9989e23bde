"""What the worker of a seat holds: observations to answer, one after another, and in the end the seat's reward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from palestra.client.episode import Episode, ModelEndpoint
from palestra.client.exchange import Exchange, Settings, send_call
from palestra.client.leases import give_back
from palestra.client.protocol import abort_call, act_call, heartbeat_call, observe_call, read_claim
from palestra.errors import Conflict, EpisodeEnded, EpisodeLeaseExpired, InvalidRequest, PalestraError
from palestra.types.messages import ChatMessage
from palestra.types.seat_wire import SeatEvent, SeatObservation
from palestra.types.wire import ClaimAnswer

LOST = (EpisodeLeaseExpired, EpisodeEnded)
_CODES = {kind("").code for kind in LOST}


def says_lost(error: BaseException) -> bool:
    """Return whether an error is a server's answer that an episode or a seat is not the caller's any more.

    Model SDKs have errors of their own, which keep the server's code: as `code`, in `body`, or in the HTTP `response`.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(says_lost, error.exceptions))
    if isinstance(error, PalestraError):
        return isinstance(error, LOST)
    found = [getattr(error, "code", None), _code_in(getattr(error, "body", None))]
    read = getattr(getattr(error, "response", None), "json", None)
    if callable(read):
        with contextlib.suppress(ValueError, RuntimeError):  # no JSON, or a stream that is not read
            found.append(_code_in(read()))
    return any(isinstance(code, str) and code in _CODES for code in found)


def _code_in(body: object) -> object:
    """Return the code of a body of an error answer, which some SDKs cut down to its `error`."""
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    return inner.get("code") if isinstance(inner, Mapping) else None


def seat_of(answer: ClaimAnswer) -> tuple[Episode | None, bool]:
    """Return the claimed seat as an episode with the seat's key, or None, and whether the job is over."""
    episode, finished = read_claim(answer)
    if episode is not None and answer.episode is not None:
        episode.metadata["history"] = answer.episode.history
    return episode, finished


class ClaimedSeat:
    """A claimed seat, as its worker knows it: what `Seat` and `AsyncSeat` have in common.

    Attributes:
        episode: its id and lease, and the key and model of the seat (`policy`).
        role: the name of the seat.
        history: what an earlier worker of the seat saw and did, by the agent's name; observations continue it.
        events: what happened to other seats: claimed, left by a worker, played by a policy.
        to_act: the seats that had to act when the server was asked last.
        over: whether the episode is over.
        lost: whether the seat, or its episode, is not this worker's any more; claim again.
        reward: the seat's own, of the whole episode; None before it is over, or where it has none.
        truncated: whether the environment has cut the episode off.
        last: what the environment showed when the seat's part ended.
    """

    def __init__(self, settings: Settings, claimed: Episode, role: str) -> None:
        self._settings = settings
        self.history: Mapping[str, tuple[ChatMessage, ...]] = claimed.metadata.pop("history", {})
        self.episode, self.role = claimed, role
        self.events: list[SeatEvent] = []
        self.to_act: tuple[str, ...] = ()
        self.over = self.lost = False
        self.reward: float | None = None
        self.truncated = False
        self.last: tuple[ChatMessage, ...] = ()
        self._observation: SeatObservation | None = None
        self._left = False

    @property
    def policy(self) -> ModelEndpoint:
        """Return the model of the seat's role; its key makes calls for the seat alone."""
        return self.episode.policy

    def _next(self) -> Exchange[SeatObservation | None]:
        """Take what the server answers, and return the observation to answer, if there is one."""
        seen = max((event.number for event in self.events), default=0)
        try:
            answer = yield from send_call(self._settings, observe_call(self.episode, seen))
        except LOST:
            self.lost = True
            return None
        self.events.extend(answer.events)
        self.to_act, self._observation = answer.to_act, answer.observation
        if answer.status == "over":
            self.over, self.reward, self.truncated, self.last = True, answer.reward, answer.truncated, answer.last
        return answer.observation

    def _answer(self, action: str | ChatMessage) -> Exchange[bool]:
        if self.lost:
            return False
        if self._observation is None:
            raise InvalidRequest("there is no observation to answer; take one from the seat first")
        call = act_call(self.episode, self._observation.observation_id, action)
        try:
            return (yield from send_call(self._settings, call)).taken
        except EpisodeEnded:  # an action that was sent again may have ended the episode
            return True
        except EpisodeLeaseExpired:
            self.lost = True
            return False

    def leaving(self) -> Exchange[None]:
        """Give the seat back, unless it is over, lost or given back already."""
        if not (self.over or self.lost or self._left):
            self._left = True
            with contextlib.suppress(Conflict):
                yield from send_call(self._settings, abort_call(self.episode, "left", discard=False))

    def _ended_by(self, error: BaseException) -> Exchange[bool]:
        if self.over or not says_lost(error):
            return False
        if self.lost:
            return True
        try:
            yield from send_call(self._settings, heartbeat_call(self.episode))
        except LOST:
            yield from self._next()  # the episode may be over, with a reward
            return True
        except PalestraError:
            return False
        return False

    def settled(self, error: BaseException) -> Exchange[bool]:
        """Return whether an error of the seat's block is of no more account; otherwise give the seat back."""
        return (yield from self._ended_by(error)) or (yield from give_back(self._settings, self.episode, error))


class Seat(ClaimedSeat):
    """A claimed seat of a script: `for observation in seat: seat.act(reply)`.

    The iteration gives each observation that the seat has to answer, and ends when the episode is over and its rewards
    are on disk; `reward` is known then. An observation that is not answered is given again. The iteration also ends
    when the seat is `lost`: its time ran out, or the episode is played again because another seat's worker is gone.
    """

    def __init__(self, run: Callable[[Exchange[Any]], Any], settings: Settings, claimed: Episode, role: str) -> None:
        """Begin to play a seat.

        Args:
            run: carries out an exchange.
            claimed: what the server answered to the claim.
        """
        super().__init__(settings, claimed, role)
        self._run = run

    def __iter__(self) -> Iterator[SeatObservation]:
        """Give observations until the episode is over, or the seat is lost."""
        while not (self.over or self.lost):
            if (observation := self._run(self._next())) is not None:
                yield observation

    def act(self, action: str | ChatMessage) -> bool:
        """Answer the observation that was given last.

        Args:
            action: a text, or a message with tool calls.

        Returns:
            Whether the environment has the action; False: the seat's time for it was over, or the seat is lost.

        Raises:
            Conflict: the environment does not wait for this action any more.
            InvalidRequest: the action is too long, or nothing was observed.
        """
        return bool(self._run(self._answer(action)))

    def leave(self) -> None:
        """Give the seat back, for another worker or its policy. Does nothing if the episode is over or lost."""
        self._run(self.leaving())


class AsyncSeat(ClaimedSeat):
    """A claimed seat of an event loop: `async for observation in seat: await seat.act(reply)`. See `Seat`."""

    def __init__(
        self, run: Callable[[Exchange[Any]], Awaitable[Any]], settings: Settings, claimed: Episode, role: str
    ) -> None:
        """Begin to play a seat; see `Seat`."""
        super().__init__(settings, claimed, role)
        self._run = run

    async def __aiter__(self) -> AsyncIterator[SeatObservation]:
        """Give observations until the episode is over, or the seat is lost; see `Seat`."""
        while not (self.over or self.lost):
            if (observation := await self._run(self._next())) is not None:
                yield observation

    async def act(self, action: str | ChatMessage) -> bool:
        """Answer the observation that was given last; see `Seat.act`."""
        return bool(await self._run(self._answer(action)))

    async def leave(self) -> None:
        """Give the seat back; see `Seat.leave`."""
        await self._run(self.leaving())
