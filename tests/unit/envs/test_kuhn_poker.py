"""Kuhn poker has OpenSpiel's rules: the same information states, legal moves and returns in every game there is."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from palestra_inspect.environment_check import check_environment
from palestra_worlds import KuhnPoker
from unit.envs.playing import play, says

DEALS = [*permutations(range(3), 2)]
LINES = ["".join(moves) for length in (2, 3) for moves in product("pb", repeat=length)]


async def played(cards, moves):
    """What is shown while both players make these moves in turn, and the rewards."""
    left = iter(moves)
    seen = await play(KuhnPoker(), {"cards": [*cards]}, lambda observation: says(next(left)))
    texts = [(one.agent, one.content[0].text, one.choices) for one in seen if not one.is_last]
    return texts, {one.agent: one.reward for one in seen if one.is_last}, "".join(left)


@pytest.mark.parametrize("cards", DEALS)
async def test_every_game_is_openspiels(cards):
    pyspiel = pytest.importorskip("pyspiel")
    for moves in LINES:
        state = pyspiel.load_game("kuhn_poker").new_initial_state()
        for card in cards:
            state.apply_action(card)
        expected, used = [], 0
        while not state.is_terminal() and used < len(moves):
            player = state.current_player()
            choices = tuple("pb"[action] for action in state.legal_actions())
            expected.append((KuhnPoker.roles[player], state.information_state_string(player), choices))
            state.apply_action("pb".index(moves[used]))
            used += 1
        if not state.is_terminal():
            continue  # a beginning of longer games
        texts, rewards, unused = await played(cards, moves)
        assert texts == expected
        assert rewards == dict(zip(KuhnPoker.roles, state.returns(), strict=True))
        assert unused == moves[used:]


async def test_a_known_game():
    """By hand: 1 against 2, pass, bet, call: the second player wins 2."""
    texts, rewards, _ = await played((1, 2), "pbb")
    assert [text for _, text, _ in texts] == ["1", "2p", "1pb"]
    assert rewards == {"first": -2.0, "second": 2.0}


async def test_deals_come_from_the_tasks_seed_and_all_of_them_are_dealt():
    async def dealt(seed):
        seen = await play(KuhnPoker(), {"seed": seed}, lambda observation: says("b"))
        return seen[0].content[0].text[0] + seen[1].content[0].text[0]

    deals = [await dealt(seed) for seed in range(60)]
    assert deals == [await dealt(seed) for seed in range(60)]
    assert len(set(deals)) == 6


async def test_an_illegal_reply_is_a_fold():
    _, rewards, _ = await played((2, 0), ["b", "fold"])
    assert rewards == {"second": -1.0, "first": 1.0}


async def test_the_rules_are_read_once_if_they_are_wanted():
    left = iter("pbb")
    seen = await play(KuhnPoker(rules=True), {"cards": [0, 1]}, lambda observation: says(next(left)))
    assert [one.content[0].text.splitlines()[-1] for one in seen[:3]] == ["0", "1p", "0pb"]
    assert ["Kuhn" in one.content[0].text for one in seen[:3]] == [True, True, False]


@pytest.mark.parametrize("cards", [[0, 0], [0, 3], [1]])
async def test_a_deal_that_does_not_exist_is_refused(cards):
    with pytest.raises(ValueError, match="two different"):
        await KuhnPoker().reset({"cards": cards})


def test_it_keeps_to_what_environments_have_to_do():
    check_environment(KuhnPoker, [{"seed": seed} for seed in range(4)], ["p", "b", "b"])
    check_environment(KuhnPoker, [{"seed": 1}])
