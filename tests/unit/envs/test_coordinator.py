"""A coordinator keeps agents to a protocol: who is asked when, barriers, states, and actions out of turn."""

from __future__ import annotations

from itertools import permutations

import pytest

from palestra.envs import AgentProtocol, Coordinator, Stage, decided, free, phases, simultaneous, turns
from palestra.errors import Conflict, IllegalTransition, InvalidEnvironment
from palestra.types.states import AgentState

ABC = ("a", "b", "c")


def asked(protocol, answers: int, roles=ABC, deaths=()) -> list[list[str]]:
    """Who is asked together, until so many barriers are over; `deaths` are (barrier, role)."""
    coordinator: Coordinator[str] = Coordinator(roles, protocol)
    found = [list(coordinator.begin())]
    for number in range(answers):
        if not coordinator.to_act:
            break
        for role in coordinator.to_act[::-1]:
            coordinator.answer(role, "x")
        following: list[str] = []
        while actions := coordinator.take():
            for barrier, role in deaths:
                if barrier == number and role in coordinator.playing:
                    coordinator.retire(role)
            following += coordinator.advance(tuple(actions))
        found.append(following)
    return found


def test_turns_follow_an_order_round_after_round():
    assert asked(turns(("b", "a")), 4) == [["b"], ["a"], ["b"], ["a"], ["b"]]
    assert asked(turns(ABC, rounds=1), 9) == [["a"], ["b"], ["c"], []]
    assert asked(turns(("a", "b", "a"), rounds=1), 9) == [["a"], ["b"], ["a"], []]


def test_a_role_that_is_done_is_left_out_of_the_order():
    assert asked(turns(ABC), 4, deaths=[(0, "b")]) == [["a"], ["c"], ["a"], ["c"], ["a"]]
    assert asked(turns(ABC), 9, deaths=[(0, "b"), (0, "a"), (0, "c")]) == [["a"], []]


def test_simultaneous_roles_are_asked_together():
    assert asked(simultaneous(), 2) == [[*ABC]] * 3
    assert asked(simultaneous(("c", "a"), rounds=2), 9) == [["c", "a"], ["c", "a"], []]
    assert asked(simultaneous(), 2, deaths=[(0, "b")]) == [[*ABC], ["a", "c"], ["a", "c"]]


def test_phases_have_a_barrier_between_them():
    bids = phases([simultaneous(rounds=1), turns(("a", "b"), rounds=1)], repeat=True)
    assert asked(bids, 6) == [[*ABC], ["a"], ["b"], [*ABC], ["a"], ["b"], [*ABC]]
    assert asked(phases([turns(("a",), rounds=1), simultaneous()]), 2) == [["a"], [*ABC], [*ABC]]
    # The next phase begins when the last of the free phase is there, whoever that is.
    coordinator: Coordinator[str] = Coordinator(
        ABC, phases([free(actions=1), turns(ABC, rounds=1)]), deterministic=False
    )
    coordinator.begin()
    for role, following in (("b", ()), ("c", ()), ("a", ("a",))):
        coordinator.answer(role, "x")
        assert coordinator.advance(tuple(coordinator.take())) == following


def test_a_phase_in_which_nobody_is_left_is_passed_over():
    parts = [turns(("a",), rounds=1), turns(("b",), rounds=1), turns(("c",), rounds=1)]
    assert asked(phases(parts), 9, deaths=[(0, "b")]) == [["a"], ["c"], []]


def test_a_world_decides_who_is_next():
    following = iter([("b",), ("a", "c"), ()])
    assert asked(decided(lambda: next(following)), 9) == [["b"], ["a", "c"], []]


@pytest.mark.parametrize("order", [*permutations(ABC)])
def test_actions_of_a_barrier_are_revealed_together_in_the_order_of_roles(order):
    for protocol in (simultaneous(), simultaneous(("c", "b", "a"))):
        coordinator: Coordinator[str] = Coordinator(ABC, protocol)
        coordinator.begin()
        for role in order:
            assert coordinator.take() == {}
            coordinator.answer(role, role.upper())
        assert list(coordinator.take().items()) == [("a", "A"), ("b", "B"), ("c", "C")]
        assert coordinator.take() == {}


@pytest.mark.parametrize("order", [*permutations(ABC)])
def test_without_barriers_a_deterministic_coordinator_applies_one_after_another_in_the_order_of_roles(order):
    coordinator: Coordinator[str] = Coordinator(ABC, free())
    coordinator.begin()
    for role in order:
        assert coordinator.take() == {}
        coordinator.answer(role, role.upper())
    taken = []
    while actions := coordinator.take():
        taken.append(actions)
        assert coordinator.advance(tuple(actions)) == tuple(actions)
    assert taken == [{"a": "A"}, {"b": "B"}, {"c": "C"}]
    assert coordinator.to_act == ABC


def test_without_barriers_and_determinism_each_action_is_applied_when_it_arrives():
    coordinator: Coordinator[str] = Coordinator(ABC, free(actions=2), deterministic=False)
    coordinator.begin()
    for role in ("c", "c", "a"):
        coordinator.answer(role, "x")
        assert coordinator.take() == {role: "x"}
        coordinator.advance((role,))
    assert coordinator.to_act == ("b", "a")


def test_an_action_out_of_turn_is_refused_with_the_state_and_with_who_is_to_act():
    coordinator: Coordinator[str] = Coordinator(ABC, turns(ABC))
    coordinator.begin()
    with pytest.raises(IllegalTransition, match=r"'b'.*waiting.*'a'") as e:
        coordinator.answer("b", "x")
    assert isinstance(e.value, Conflict)
    assert e.value.http_status == 409
    coordinator.retire("b")
    with pytest.raises(IllegalTransition, match=r"'b'.*done.*acting"):
        coordinator.answer("b", "x")
    with pytest.raises(IllegalTransition, match=r"'b'.*become"):
        coordinator.retire("b")
    with pytest.raises(InvalidEnvironment, match=r"'d'.*'a'.*'b'.*'c'"):
        coordinator.answer("d", "x")


def test_states_follow_what_the_agents_do():
    coordinator: Coordinator[str] = Coordinator(ABC, simultaneous(("a", "b"), rounds=1))
    coordinator.begin()
    assert [coordinator.state(role) for role in ABC] == [AgentState.ACTING, AgentState.ACTING, AgentState.WAITING]
    coordinator.answer("b", "x")
    assert coordinator.state("b") is AgentState.WAITING
    assert coordinator.who_acts() == "'a' is to act"


def test_an_agent_that_ends_while_it_acts_completes_the_barrier_of_the_others():
    coordinator: Coordinator[str] = Coordinator(ABC, simultaneous())
    coordinator.begin()
    coordinator.answer("c", "C")
    coordinator.answer("a", "A")
    assert coordinator.take() == {}
    coordinator.retire("b")
    assert coordinator.take() == {"a": "A", "c": "C"}


class Twice(AgentProtocol):
    """A user's own: `a` always acts twice as often as the others."""

    def begin(self, playing):
        self.number = 0
        return ("a",)

    def following(self, acted, playing, pending):
        self.number += 1
        return ("a",) if self.number % 3 else ("b",)

    def stages(self):
        return (Stage(kind="twice", roles=("a", "b")),)


def test_a_protocol_of_a_users_own_has_three_methods():
    assert asked(Twice(), 4, roles=("a", "b")) == [["a"], ["a"], ["a"], ["b"], ["a"]]


def test_what_a_protocol_can_not_ask_is_named():
    with pytest.raises(InvalidEnvironment, match=r"role.*'d'"):
        asked(turns(("a", "d")), 3)
    with pytest.raises(InvalidEnvironment, match=r"'a'.*acting"):
        asked(decided(lambda: ("a", "a")), 1)
    with pytest.raises(InvalidEnvironment, match=r"'a'.*done"):
        asked(decided(lambda: ("a",)), 1, deaths=[(0, "a")])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: turns(()), r"least.*role"),
        (lambda: turns(ABC, rounds=0), r"round.*0"),
        (lambda: simultaneous(("a", "a")), r"'a'.*named"),
        (lambda: phases([]), r"least.*protocol"),
        (lambda: phases([free(), turns(ABC)]), r"phase.*1.*2"),
        (lambda: phases([turns(ABC)], repeat=True), r"phase.*1.*1"),
    ],
)
def test_a_protocol_that_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("roles", [(), ("a", "a")])
def test_roles_have_names_of_their_own(roles):
    with pytest.raises(InvalidEnvironment, match=r"least.*role"):
        Coordinator(roles, turns(("a",)))
