from __future__ import annotations

from itertools import product

import pytest

from palestra.errors import IllegalTransition
from palestra.schemas.states import (
    TRANSITIONS,
    EpisodeState,
    GroupState,
    JobState,
    TurnState,
    check_transition,
)

# The lifecycles as docs/architecture.md tells them, written down a second time.
ALLOWED = {
    JobState: "queued>starting queued>cancelled starting>running starting>queued starting>failed starting>cancelled "
    "running>completed running>failed running>cancelled running>queued",
    EpisodeState: "registered>claimed registered>discarded claimed>completed claimed>registered claimed>discarded",
    GroupState: "open>ready open>dropped",
    TurnState: "pending>generating generating>interacting interacting>pending "
    "pending>terminated generating>terminated interacting>terminated",
}
MOVES = [(kind, a, b) for kind in ALLOWED for a, b in product(kind, kind)]


@pytest.mark.parametrize(("kind", "current", "following"), MOVES)
def test_a_move_is_possible_exactly_when_the_lifecycle_has_it(kind, current, following):
    if f"{current}>{following}" in ALLOWED[kind].split():
        check_transition("it", current, following)
    else:
        with pytest.raises(IllegalTransition, match=f"it is {current} and can't become {following}"):
            check_transition("it", current, following)


@pytest.mark.parametrize("kind", ALLOWED)
def test_every_state_has_a_line_in_the_table(kind):
    assert set(kind) <= TRANSITIONS.keys()


def test_states_of_one_lifecycle_never_become_states_of_another():
    for current, following in TRANSITIONS.items():
        assert all(type(state) is type(current) for state in following)
