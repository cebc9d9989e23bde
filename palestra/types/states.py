"""The lifecycles: each is a StrEnum and a table of allowed transitions, enforced by `check_transition`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from palestra.errors import IllegalTransition

SEAT_LOST, SEAT_UNCLAIMED = "seat_lost", "seat_unclaimed"  # why an episode is given back; see `rollout.Termination`
# Kinds of events: a part of a job was lost, which did not end the job; their data has a `text` for people.
LOSSES = ("trainer_lost", "base_lost", "engine_worker_lost")
STUCK = "stuck"  # what a job reports, with such a text, when the watchdog ends it, before all of it has ended


class JobState(StrEnum):
    """States of a job. STARTING and RUNNING go back to QUEUED when the job's server or machine is lost."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class BaseState(StrEnum):
    """States of a service's base server. SERVING goes back to LOADING when the server has died."""

    LOADING = "loading"
    SERVING = "serving"
    ENDING = "ending"


class EpisodeState(StrEnum):
    """States of an attempt at a task.

    CLAIMED goes back to REGISTERED when the lease expires or the worker releases it. In a job with a judge, an
    episode that its worker has ended is UNJUDGED until it is judged.
    """

    REGISTERED = "registered"
    CLAIMED = "claimed"
    UNJUDGED = "unjudged"
    COMPLETED = "completed"
    DISCARDED = "discarded"


ENDED = (EpisodeState.UNJUDGED, EpisodeState.COMPLETED, EpisodeState.DISCARDED)  # states of episodes that were played


class GroupState(StrEnum):
    """States of the episodes of one task as a group. Only a READY group is trained on.

    A DROPPED group has lost too many episodes, a SKIPPED one has no learning signal (dynamic sampling); each is
    replaced by another group.
    """

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"
    SKIPPED = "skipped"


REPLACED = (GroupState.DROPPED, GroupState.SKIPPED)


class TurnState(StrEnum):
    """States of a conversation's turn in a session. Only tokens sampled in GENERATING are trained on."""

    PENDING = "pending"
    GENERATING = "generating"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentState(StrEnum):
    """States of an agent in an episode of several agents: only an ACTING one may act."""

    WAITING = "waiting"
    ACTING = "acting"
    DONE = "done"


class SeatState(StrEnum):
    """States of an external player's slot: an agent of an episode that an external worker plays.

    If its worker leaves or the lease expires, the slot becomes FREE again, or PLAYED by its policy from then on, or
    LOST, if the environment scores that as a forfeit.
    """

    FREE = "free"
    HELD = "held"
    PLAYED = "played"
    LOST = "lost"
    OVER = "over"


TRANSITIONS: Mapping[StrEnum, frozenset[StrEnum]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    # A job whose server or machine was lost waits in the queue again, as long as it has restarts left.
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.QUEUED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    BaseState.LOADING: frozenset({BaseState.SERVING, BaseState.ENDING}),
    BaseState.SERVING: frozenset({BaseState.LOADING, BaseState.ENDING}),
    BaseState.ENDING: frozenset(),
    EpisodeState.REGISTERED: frozenset({EpisodeState.CLAIMED, EpisodeState.DISCARDED}),
    # A claimed episode is played again by another worker if its lease expires or its worker gives it back.
    EpisodeState.CLAIMED: frozenset(
        {EpisodeState.UNJUDGED, EpisodeState.COMPLETED, EpisodeState.REGISTERED, EpisodeState.DISCARDED}
    ),
    EpisodeState.UNJUDGED: frozenset({EpisodeState.COMPLETED, EpisodeState.DISCARDED}),
    EpisodeState.COMPLETED: frozenset(),
    EpisodeState.DISCARDED: frozenset(),
    GroupState.OPEN: frozenset({GroupState.READY, *REPLACED}),
    GroupState.READY: frozenset(),
    GroupState.DROPPED: frozenset(),
    GroupState.SKIPPED: frozenset(),
    TurnState.PENDING: frozenset({TurnState.GENERATING, TurnState.TERMINATED}),
    TurnState.GENERATING: frozenset({TurnState.INTERACTING, TurnState.TERMINATED}),
    TurnState.INTERACTING: frozenset({TurnState.PENDING, TurnState.TERMINATED}),
    TurnState.TERMINATED: frozenset(),
    # An agent may be out of the game while others act, or because of what it did itself, or did not do in time.
    AgentState.WAITING: frozenset({AgentState.ACTING, AgentState.DONE}),
    AgentState.ACTING: frozenset({AgentState.WAITING, AgentState.DONE}),
    AgentState.DONE: frozenset(),
    SeatState.FREE: frozenset({SeatState.HELD, SeatState.PLAYED, SeatState.LOST, SeatState.OVER}),
    SeatState.HELD: frozenset({SeatState.FREE, SeatState.PLAYED, SeatState.OVER}),
    SeatState.PLAYED: frozenset({SeatState.OVER}),
    SeatState.LOST: frozenset({SeatState.OVER}),
    SeatState.OVER: frozenset(),
}


def check_transition(subject: str, current: StrEnum, following: StrEnum) -> None:
    """Raise IllegalTransition unless the lifecycle allows `current` to become `following`."""
    if following not in TRANSITIONS[current]:
        raise IllegalTransition(f"{subject} is {current} and can't become {following}")
