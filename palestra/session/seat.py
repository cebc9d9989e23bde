"""One player slot of an episode: its worker, its pending observations and its history."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from dataclasses import dataclass, field

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
