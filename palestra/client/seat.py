"""The objects of an external player's worker: observations to answer one after another, and finally the reward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from palestra.client.episode import Episode, ModelEndpoint
from palestra.client.exchange import Exchange, Settings, claim_next, release_episode, send_call
from palestra.client.protocol import abort_call, act_call, claim_call, heartbeat_call, observe_call, read_claim
from palestra.client.requests import Done
from palestra.errors import Conflict, EpisodeEnded, EpisodeLeaseExpired, InvalidRequest, PalestraError
from palestra.types.messages import ChatMessage
from palestra.types.seat_wire import SeatEvent, SeatObservation
from palestra.types.wire import ClaimAnswer

Taken = TypeVar("Taken")
LOST = (EpisodeLeaseExpired, EpisodeEnded)
_CODES = {kind("").code for kind in LOST}


def says_lost(error: BaseException) -> bool:
    """Return whether an error is a server's answer that an episode or slot no longer belongs to the caller.

    Model SDKs have their own errors, with the server's code as `code`, in `body`, or in the HTTP `response`.
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
    """Return the code in the body of an error answer, which some SDKs reduce to its `error`."""
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    return inner.get("code") if isinstance(inner, Mapping) else None


def claim_next_seat(settings: Settings, role: str, episode_id: str | None) -> Exchange[Episode | None]:
    """Claim an external player's slot, of any episode if `episode_id` is None; return None when the job is over."""
    call = partial(claim_call, settings.worker_id, None, role=role, episode_id=episode_id)
    return claim_next(settings, call, seat_of)


def seat_of(answer: ClaimAnswer) -> tuple[Episode | None, bool]:
    """Return the claimed slot as an episode with the slot's key, or None, and whether the job is over."""
    episode, finished = read_claim(answer)
    if episode is not None and answer.episode is not None:
        episode.metadata["history"] = answer.episode.history
    return episode, finished


class ClaimedSeat(Generic[Taken, Done]):
    """An external player's claimed slot: the common part of `Seat` and `AsyncSeat`, whose methods are awaited.

    Attributes:
        episode: its id and lease, and the slot's key and model (`policy`).
        history: what an earlier worker of the slot saw and did, by agent; observations continue it.
        events: of other external players: claimed, left by a worker, played by a policy.
        to_act: the external players that had to act at the last request.
        lost: whether the slot, or its episode, no longer belongs to this worker; claim again.
        reward: the player's own, for the whole episode; None before it is over, or without one.
        truncated: whether the environment has cut the episode off.
        last: the observation that ended the player's part.
    """

    def __init__(self, run: Callable[[Exchange[Any]], Any], settings: Settings, claimed: Episode, role: str) -> None:
        self._run, self._settings = run, settings
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
        """Return the model of the player's role; its key is only valid for this player's calls."""
        return self.episode.policy

    def act(self, action: str | ChatMessage) -> Taken:
        """Answer the last observation; return False if its time was over, or the slot is lost.

        Raises:
            Conflict: the environment no longer waits for this action.
            InvalidRequest: the action is too long, or there was no observation.
        """
        taken: Taken = self._run(self._answer(action))
        return taken

    def leave(self) -> Done:
        """Release the slot, for another worker or its policy. No effect if the episode is over or lost."""
        left: Done = self._run(self.leaving())
        return left

    def _next(self) -> Exchange[SeatObservation | None]:
        """Process the server's answer, and return the observation to answer, if there is one."""
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
        """Release the slot, unless it is over, lost or released already."""
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
        """Return whether an error of the block can be ignored; otherwise release the slot."""
        return (yield from self._ended_by(error)) or (yield from release_episode(self._settings, self.episode, error))


class Seat(ClaimedSeat[bool, None]):
    """A claimed slot of a script: `for observation in seat: seat.act(reply)`.

    The iteration gives each observation to answer, and ends when the episode is over and its rewards are on disk; then
    `reward` is known. An unanswered observation is given again. The iteration also ends when the slot is `lost`: its
    time ran out, or the episode is retried because another player's worker left.
    """

    def __iter__(self) -> Iterator[SeatObservation]:
        """Yield observations until the episode is over, or the slot is lost."""
        while not (self.over or self.lost):
            if (observation := self._run(self._next())) is not None:
                yield observation


class AsyncSeat(ClaimedSeat[Coroutine[Any, Any, bool], Coroutine[Any, Any, None]]):
    """A claimed slot of an event loop: `async for observation in seat: await seat.act(reply)`. See `Seat`."""

    async def __aiter__(self) -> AsyncIterator[SeatObservation]:
        """Yield observations until the episode is over, or the slot is lost; see `Seat`."""
        while not (self.over or self.lost):
            if (observation := await self._run(self._next())) is not None:
                yield observation
