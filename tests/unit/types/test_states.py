from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import pytest

from palestra.errors import IllegalTransition
from palestra.types.states import (
    TRANSITIONS,
    AgentState,
    EpisodeState,
    GroupState,
    JobState,
    SeatState,
    TurnState,
    check_transition,
)

BEGINNINGS = [
    JobState.QUEUED,
    EpisodeState.REGISTERED,
    GroupState.OPEN,
    TurnState.PENDING,
    AgentState.WAITING,
    SeatState.FREE,
]
ENDS = [
    *(JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED),
    *(EpisodeState.COMPLETED, EpisodeState.DISCARDED),
    *(GroupState.READY, GroupState.DROPPED, GroupState.SKIPPED),
    TurnState.TERMINATED,
    AgentState.DONE,
    SeatState.OVER,
]


def following(state: StrEnum) -> Iterator[StrEnum]:
    """Yield the states that `state` may become."""
    for other in type(state):
        try:
            check_transition("it", state, other)
        except IllegalTransition:
            continue
        yield other


def reached_from(state: StrEnum) -> set[StrEnum]:
    """Return the states that follow in any number of moves."""
    found: set[StrEnum] = set()
    left = [state]
    while left:
        new = set(following(left.pop())) - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("state", ENDS, ids=repr)
def test_what_is_over_stays_as_it_is(state):
    """A reward that counts is not changed, and a job that has ended does not run again."""
    assert set(following(state)) == set()


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=repr)
def test_every_state_is_reached_from_the_first_and_comes_to_an_end(beginning):
    assert reached_from(beginning) | {beginning} == set(type(beginning))
    for state in type(beginning):
        assert state in ENDS or reached_from(state) & {*ENDS}
    assert all(state not in following(state) for state in type(beginning)), "a move is a change"


def test_a_job_runs_before_it_completes_and_starts_before_it_runs():
    assert [state for state in JobState if JobState.COMPLETED in following(state)] == [JobState.RUNNING]
    assert [state for state in JobState if JobState.RUNNING in following(state)] == [JobState.STARTING]


def test_only_an_episode_that_is_claimed_or_waits_for_its_judge_gets_a_reward():
    rewarded = [state for state in EpisodeState if EpisodeState.COMPLETED in following(state)]
    assert rewarded == [EpisodeState.CLAIMED, EpisodeState.UNJUDGED]
    assert [state for state in EpisodeState if EpisodeState.UNJUDGED in following(state)] == [EpisodeState.CLAIMED]
    assert EpisodeState.REGISTERED in following(EpisodeState.CLAIMED)


def test_only_what_waits_for_a_reply_becomes_a_reply_and_a_turn_can_always_be_broken_off():
    assert [state for state in TurnState if TurnState.GENERATING in following(state)] == [TurnState.PENDING]
    assert all(TurnState.TERMINATED in following(state) for state in TurnState if state not in ENDS)


def test_an_illegal_move_is_refused_with_both_states():
    with pytest.raises(IllegalTransition, match=r"job-1.*become"):
        check_transition("job-1", JobState.COMPLETED, JobState.RUNNING)
    with pytest.raises(IllegalTransition):
        check_transition("it", EpisodeState.CLAIMED, JobState.RUNNING)


def test_states_of_one_lifecycle_never_become_states_of_another():
    for current, allowed in TRANSITIONS.items():
        assert all(type(state) is type(current) for state in allowed)
