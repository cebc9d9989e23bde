from __future__ import annotations

import pytest

from palestra.errors import IllegalTransition
from palestra.session.context import StateTimes
from palestra.session.registry import CallInFlight, Turns
from palestra.types.states import TurnState
from unit.building import FakeClock


def test_the_time_in_each_state_is_added_up_and_what_goes_on_counts_up_to_now():
    clock = FakeClock()
    times = StateTimes(clock)
    turns, first, second = Turns("a call", times), CallInFlight(0), CallInFlight(1)
    turns.begin([first, second])
    for wait, state in ((2, TurnState.GENERATING), (3, TurnState.INTERACTING), (4, TurnState.PENDING)):
        clock.ticks += wait
        clock.wall -= 10**9
        turns.move(first, state)
        assert first.state is state
    clock.ticks += 1
    assert times.seconds == {TurnState.PENDING: 2 + 1 + 10.0, TurnState.GENERATING: 3.0}
    assert times._inside[TurnState.PENDING] == 2
    turns.move(second, TurnState.TERMINATED)
    clock.ticks += 5
    assert times.seconds[TurnState.PENDING] == 2 + 6 + 10
    assert times._inside[TurnState.PENDING] == 1


def test_a_move_that_the_machine_does_not_have_changes_nothing():
    times = StateTimes(FakeClock())
    turns, call = Turns("a call of episode e", times), CallInFlight()
    turns.begin([call])
    with pytest.raises(IllegalTransition, match="episode e"):
        turns.move(call, TurnState.INTERACTING)
    assert call.state is TurnState.PENDING
    assert times._inside[TurnState.PENDING] == 1
