"""What the worker of a seat holds: observations to answer, one after another, and in the end the seat's reward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from palestra.client.episode import Episode, ModelEndpoint
from palestra.client.protocol import Call, abort_call, act_call, observe_call, read_claim
from palestra.errors import Conflict, EpisodeEnded, InvalidRequest
from palestra.types.messages import ChatMessage
from palestra.types.seat_wire import SeatAnswer, SeatEvent, SeatObservation
from palestra.types.wire import ClaimAnswer


def seat_of(answer: ClaimAnswer) -> tuple[Episode | None, bool]:
    """Return the claimed seat as an episode with the seat's key, or None, and whether the job is over."""
    episode, finished = read_claim(answer)
    if episode is not None and answer.episode is not None:
        episode.metadata["history"] = answer.episode.history
    return episode, finished


class SeatState:
    """A claimed seat, as its worker knows it: what `Seat` and `AsyncSeat` have in common.

    Attributes:
        episode: its id and lease, and the key and model of the seat (`policy`).
        role: the name of the seat.
        history: what an earlier worker of the seat saw and did, by the agent's name; observations continue it.
        events: what happened to other seats: claimed, left by a worker, played by a policy.
        to_act: the seats that had to act when the server was asked last.
        over: whether the episode is over.
        reward: the seat's own, of the whole episode; None before it is over, or where it has none.
        truncated: whether the environment has cut the episode off.
        last: what the environment showed when the seat's part ended.
    """

    def __init__(self, claimed: Episode, role: str) -> None:
        """Begin to play a seat.

        Args:
            claimed: what the server answered to the claim.
            role: the name of the seat.
        """
        self.history: Mapping[str, tuple[ChatMessage, ...]] = claimed.metadata.pop("history", {})
        self.episode, self.role = claimed, role
        self.events: list[SeatEvent] = []
        self.to_act: tuple[str, ...] = ()
        self.over = False
        self.reward: float | None = None
        self.truncated = False
        self.last: tuple[ChatMessage, ...] = ()
        self._observation: SeatObservation | None = None
        self._left = False

    @property
    def policy(self) -> ModelEndpoint:
        """Return the model of the seat's role; its key makes calls for the seat alone."""
        return self.episode.policy

    def _call(self) -> Call[SeatAnswer]:
        return observe_call(self.episode, max((event.number for event in self.events), default=0))

    def _read(self, answer: SeatAnswer) -> SeatObservation | None:
        """Take what the server answered, and return the observation to answer, if there is one."""
        self.events.extend(answer.events)
        self.to_act, self._observation = answer.to_act, answer.observation
        if answer.status == "over":
            self.over, self.reward, self.truncated, self.last = True, answer.reward, answer.truncated, answer.last
        return answer.observation

    def _action(self, action: str | ChatMessage) -> Call[Any]:
        if self._observation is None:
            raise InvalidRequest("there is no observation to answer; take one from the seat first")
        return act_call(self.episode, self._observation.observation_id, action)

    def _leaving(self) -> Call[Any] | None:
        """Return the request that gives the seat back; None: there is nothing to give back."""
        if self.over or self._left:
            return None
        self._left = True
        return abort_call(self.episode, "left", discard=False)


class Seat(SeatState):
    """A claimed seat of a script: `for observation in seat: seat.act(reply)`.

    The iteration gives each observation that the seat has to answer, and ends when the episode is over and its rewards
    are on disk; `reward` is known then. An observation that is not answered is given again.
    """

    def __init__(self, send: Callable[[Call[Any]], Any], claimed: Episode, role: str) -> None:
        """Begin to play a seat.

        Args:
            send: sends a request until it is answered.
            claimed: what the server answered to the claim.
            role: the name of the seat.
        """
        super().__init__(claimed, role)
        self._send = send

    def __iter__(self) -> Iterator[SeatObservation]:
        """Give observations until the episode is over.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the seat was lost, or the episode is played again; claim again.
        """
        while not self.over:
            if (observation := self._read(self._send(self._call()))) is not None:
                yield observation

    def act(self, action: str | ChatMessage) -> bool:
        """Answer the observation that was given last.

        Args:
            action: a text, or a message with tool calls.

        Returns:
            Whether the environment has the action; False: the seat's time for it was over.

        Raises:
            EpisodeLeaseExpired: the seat was lost; claim again.
            Conflict: the environment does not wait for this action any more.
            InvalidRequest: the action is too long, or nothing was observed.
        """
        with contextlib.suppress(EpisodeEnded):  # an action that was sent again may have ended the episode
            return bool(self._send(self._action(action)).taken)
        return True

    def leave(self) -> None:
        """Give the seat back, for another worker or its policy. Does nothing if the episode is over or lost."""
        if (call := self._leaving()) is not None:
            with contextlib.suppress(Conflict):
                self._send(call)


class AsyncSeat(SeatState):
    """A claimed seat of an event loop: `async for observation in seat: await seat.act(reply)`. See `Seat`."""

    def __init__(self, send: Callable[[Call[Any]], Awaitable[Any]], claimed: Episode, role: str) -> None:
        """Begin to play a seat.

        Args:
            send: sends a request until it is answered.
            claimed: what the server answered to the claim.
            role: the name of the seat.
        """
        super().__init__(claimed, role)
        self._send = send

    async def __aiter__(self) -> AsyncIterator[SeatObservation]:
        """Give observations until the episode is over; see `Seat`."""
        while not self.over:
            if (observation := self._read(await self._send(self._call()))) is not None:
                yield observation

    async def act(self, action: str | ChatMessage) -> bool:
        """Answer the observation that was given last; see `Seat.act`."""
        with contextlib.suppress(EpisodeEnded):
            return bool((await self._send(self._action(action))).taken)
        return True

    async def leave(self) -> None:
        """Give the seat back; see `Seat.leave`."""
        if (call := self._leaving()) is not None:
            with contextlib.suppress(Conflict):
                await self._send(call)
