from __future__ import annotations

import pytest

from palestra.errors import IllegalTransition
from palestra.schemas.states import TurnState
from palestra.session.turn import Turn
from unit.building import FakeClock


def test_the_time_in_each_state_is_added_up():
    clock, seconds = FakeClock(), {TurnState.PENDING: 1.0}
    turn = Turn("a call", clock, seconds)
    for wait, state in ((2, TurnState.GENERATING), (3, TurnState.INTERACTING), (4, TurnState.PENDING)):
        clock.ticks += wait
        clock.wall -= 10**9
        turn.move(state)
        assert turn.state is state
    assert seconds == {TurnState.PENDING: 3.0, TurnState.GENERATING: 3.0, TurnState.INTERACTING: 4.0}


def test_a_move_that_the_machine_does_not_have_changes_nothing():
    clock, seconds = FakeClock(), {}
    turn = Turn("a call of episode e", clock, seconds)
    with pytest.raises(IllegalTransition, match="a call of episode e"):
        turn.move(TurnState.INTERACTING)
    assert (turn.state, seconds) == (TurnState.PENDING, {})
