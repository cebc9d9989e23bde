"""The lifecycles: each a StrEnum and a table of the moves that it allows, enforced by `check_transition`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from palestra.errors import IllegalTransition


class JobState(StrEnum):
    """One run of one tenant."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EpisodeState(StrEnum):
    """One attempt at a task. CLAIMED goes back to REGISTERED when its lease runs out or it is given back."""

    REGISTERED = "registered"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    DISCARDED = "discarded"


class GroupState(StrEnum):
    """The episodes of one task. Only a READY group is trained."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


class TurnState(StrEnum):
    """The rollout machine, in the session; only tokens of GENERATING are trained."""

    PENDING = "pending"
    GENERATING = "generating"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


TRANSITIONS: Mapping[StrEnum, frozenset[StrEnum]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.QUEUED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    EpisodeState.REGISTERED: frozenset({EpisodeState.CLAIMED, EpisodeState.DISCARDED}),
    EpisodeState.CLAIMED: frozenset({EpisodeState.COMPLETED, EpisodeState.REGISTERED, EpisodeState.DISCARDED}),
    EpisodeState.COMPLETED: frozenset(),
    EpisodeState.DISCARDED: frozenset(),
    GroupState.OPEN: frozenset({GroupState.READY, GroupState.DROPPED}),
    GroupState.READY: frozenset(),
    GroupState.DROPPED: frozenset(),
    TurnState.PENDING: frozenset({TurnState.GENERATING, TurnState.TERMINATED}),
    TurnState.GENERATING: frozenset({TurnState.INTERACTING, TurnState.TERMINATED}),
    TurnState.INTERACTING: frozenset({TurnState.PENDING, TurnState.TERMINATED}),
    TurnState.TERMINATED: frozenset(),
}


def check_transition(subject: str, current: StrEnum, following: StrEnum) -> None:
    """Raise unless `current` may become `following`.

    Raises:
        IllegalTransition: the table does not have this move.
    """
    if following not in TRANSITIONS[current]:
        raise IllegalTransition(f"{subject} is {current} and can't become {following}")
