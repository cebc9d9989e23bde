"""One seat of an episode: who holds it, what waits there for an action, and what was said."""

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
        """Return the observation as the worker of the seat gets it."""
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
    """One seat. Times are monotonic seconds.

    Attributes:
        role: its name, which is the agent's.
        free_since: when the last worker left it, or when the episode began.
        state: whether a worker holds it.
        fence: grows with every claim, so that requests of an earlier worker are refused.
        worker_id: of the last worker.
        left: how many workers have left it, or have died.
        asked: its observations that wait for an action, oldest first, by id.
        acted: a digest of each action, by the id of the observation that it answered.
        history: observations and actions, by the name of the agent (the seat, or a subagent of it).
        last: what it was shown when its part ended.
        calls: model calls in flight of the worker that holds it.
        held_since: when its worker took it.
        told: how many events of the episode its worker was given.
        missed: observations for whose action the time was over.
        finished: whether its part is over, so that nothing will be asked of it.
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
        """Change the state.

        Raises:
            IllegalTransition: a seat can't come from its state to `following`.
        """
        check_transition(f"the seat {self.role}", self.state, following)
        self.state = following


def action_digest(action: ChatMessage) -> bytes:
    """Return a digest of 16 bytes, by which an action that is sent again is recognised."""
    return hashlib.blake2b(action.model_dump_json().encode(), digest_size=16).digest()
