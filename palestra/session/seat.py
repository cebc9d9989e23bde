"""One player slot of an episode: its worker, observations and model calls, and the clocks of its environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from palestra.types.messages import ChatMessage, Observation
from palestra.types.seat_wire import SeatObservation
from palestra.types.states import SeatState, check_transition


@dataclass(kw_only=True, slots=True)
class AskedObservation:
    """An observation that waits for an action. `since` is in monotonic seconds; None as answer: the policy plays."""

    observation: Observation
    number: int
    since: float
    answer: asyncio.Future[ChatMessage | None]

    def shown(self) -> SeatObservation:
        """Return the observation in the form for the player's worker."""
        observation = self.observation
        return SeatObservation(
            observation_id=observation.id,
            agent=observation.agent,
            step=self.number,
            content=observation.content,
            tools=observation.tools,
            choices=observation.choices,
            reward=observation.reward,  # type: ignore[arg-type]  # a Mapping, of which pydantic makes a dict
        )


@dataclass(kw_only=True, slots=True)
class EpisodeSeat:
    """One player slot. Times are monotonic seconds.

    Attributes:
        role: name of the slot and of its agent.
        free_since: since the last worker left, or the episode began.
        fence: grows with every claim, so that requests of earlier workers are refused.
        left: number of workers that left or died.
        asked: pending observations by id, oldest first.
        acted: digests of actions by observation id.
        history: observations and actions by agent name (the slot's or its subagents').
        last: its last observation, at the end of its part.
        calls: running model calls of the present worker.
        held_since: when its worker claimed it.
        told: number of the episode's events that its worker received.
        missed: observations whose time ran out.
        finished: whether its part is over, and no observation will follow.
        kept: whether its last worker held it until the episode ended.
    """

    role: str
    free_since: float
    state: SeatState = SeatState.FREE
    fence: int = 0
    worker_id: str = ""
    left: int = 0
    asked: dict[str, AskedObservation] = field(default_factory=dict)
    acted: dict[str, bytes] = field(default_factory=dict)
    history: defaultdict[str, tuple[ChatMessage, ...]] = field(default_factory=lambda: defaultdict(tuple))
    last: tuple[ChatMessage, ...] = ()
    calls: set[asyncio.Task[object]] = field(default_factory=set)
    held_since: float = 0.0
    missed: set[str] = field(default_factory=set)
    told: int = 0
    finished: bool = False
    kept: bool = False

    def move(self, following: SeatState) -> None:
        """Change the state."""
        check_transition(f"the seat {self.role}", self.state, following)
        self.state = following


def action_digest(action: ChatMessage) -> bytes:
    """Return a digest of 16 bytes that identifies a repeated action."""
    return hashlib.blake2b(action.model_dump_json().encode(), digest_size=16).digest()


POLICY = 0  # the fence under which the policy of a role acts; those of workers are larger
ENVIRONMENT = -1  # the fence under which the environment acts in a seat's place


@dataclass(kw_only=True, slots=True)
class _Call:
    """A model call of an external player. `forget` frees its seed; None: it was freed, or the episode is over."""

    role: str
    number: int
    fences: set[int]  # of the workers that asked for it
    forget: Callable[[], None] | None


class SeatCalls:
    """Records which worker made each call, and who gave the action of each TimeStep.

    A lost worker's calls without an action must not be trained. Their seeds are freed, so that the next worker's equal
    calls get the same tokens: a worker's death does not change the training data.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by index of the Chat
        self._acted_by: dict[int, int] = {}  # TimeStep -> fence of the seat under which its action was given

    def note(self, role: str, fence: int, number: int, index: int, forget: Callable[[], None]) -> None:
        """Record the worker of a call before it is sampled. `forget` frees the call's seed; it is called if its worker
        leaves before it acts, even while the call is in writing.
        """
        call = _Call(role=role, number=number, fences=set(), forget=forget)
        self._calls.setdefault(index, call).fences.add(fence)

    def note_action(self, number: int, fence: int) -> None:
        """Record that the action of a TimeStep was given. `fence` is that of the worker; or POLICY, or ENVIRONMENT
        after a timeout.
        """
        self._acted_by[number] = fence

    def free_seeds(self, role: str) -> None:
        """Free the seeds of a lost worker's calls that led to no action."""
        for call in self._calls.values():
            if call.role == role and call.number not in self._acted_by and call.forget is not None:
                call.forget()
                call.forget = None  # another call may have the seed by now

    def unused(self, present: Mapping[str, int]) -> list[int]:
        """Return the indices of lost workers' calls that led to no action: another worker or the policy acted, or the
        turn is open. `present` is, by role, the fence of its present worker, or POLICY.
        """
        return [
            index
            for index, call in sorted(self._calls.items())
            if self._acted_by.get(call.number, present[call.role]) not in call.fences
        ]

    def led_to_action(self, role: str) -> bool:
        """Return whether a worker of a player has acted after a call of its own."""
        calls = (call for call in self._calls.values() if call.role == role)
        return any(self._acted_by.get(call.number) in call.fences for call in calls)

    def close(self) -> None:
        """Drop all seeds and their callbacks, which refer to the episode's session."""
        for call in self._calls.values():
            call.forget = None


class SeatWorld(Protocol):
    """An environment that limits turn times, or scores lost players."""

    @property
    def forfeits_lost_seats(self) -> bool:
        """Return whether losing a player is a forfeit instead of a failure of the episode."""

    @property
    def scores_illegal(self) -> bool:
        """Return whether the environment accepts actions outside the observation's choices."""

    def run_clock(self, observation_id: str) -> None:
        """Run the clock of an action, if it has a limit."""

    def hold_clock(self, observation_id: str) -> None:
        """Stop the clock of an action."""

    def lose_turn(self, observation_id: str) -> None:
        """Score a turn that nobody will take; only with `forfeits_lost_seats`."""


class _Untimed:
    """An environment without time limits and forfeits."""

    forfeits_lost_seats = False
    scores_illegal = True

    def run_clock(self, observation_id: str) -> None: ...

    def hold_clock(self, observation_id: str) -> None: ...

    def lose_turn(self, observation_id: str) -> None: ...


UNTIMED: SeatWorld = _Untimed()
