"""Leduc poker has OpenSpiel's rules: the same players, legal moves and returns, whatever is played."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from palestra_inspect.environment_check import check_environment
from palestra_worlds import LeducPoker
from unit.envs.playing import play, says


@pytest.mark.parametrize("seed", range(6))
async def test_games_are_openspiels(seed):
    """All 120 deals with random moves, several times; what a player sees follows from OpenSpiel's state."""
    pyspiel = pytest.importorskip("pyspiel")
    source, seen_as = random.Random(seed), {}
    for cards in permutations(range(6), 3):
        state = pyspiel.load_game("leduc_poker").new_initial_state()
        for card in cards[:2]:
            state.apply_action(card)

        def move(observation, state=state, cards=cards):
            if state.is_chance_node():
                state.apply_action(cards[2])
            player = state.current_player()
            assert observation.agent == LeducPoker.roles[player]
            assert observation.choices == tuple("fcr"[action] for action in state.legal_actions())
            ours = (player, observation.content[0].text)
            theirs = state.information_state_string(player)
            seen_as.setdefault((player, theirs), ours)
            assert seen_as[player, theirs] == ours, "what one state of theirs shows is one state of ours"
            chosen = source.choice(observation.choices)
            state.apply_action("fcr".index(chosen))
            return says(chosen)

        seen = await play(LeducPoker(), {"cards": [*cards]}, move)
        assert state.is_terminal()
        rewards = {one.agent: one.reward for one in seen if one.is_last}
        assert rewards == dict(zip(LeducPoker.roles, state.returns(), strict=True))


async def test_a_known_game():
    """By hand: J against K, raise and call (3 each), a J for both; check, raise 4, call: the pair wins 7."""
    left = iter("rccrc")
    seen = await play(LeducPoker(), {"cards": [0, 4, 1]}, lambda observation: says(next(left)))
    assert [one.content[0].text for one in seen if not one.is_last] == ["J", "Kr", "Jrc/J", "Krc/Jc", "Jrc/Jcr"]
    assert {one.agent: one.reward for one in seen if one.is_last} == {"first": 7.0, "second": -7.0}


@pytest.mark.parametrize("cards", [[0, 0, 1], [0, 1, 6], [0, 1]])
async def test_a_deal_that_does_not_exist_is_refused(cards):
    with pytest.raises(ValueError, match="three different"):
        await LeducPoker().reset({"cards": cards})


def test_it_keeps_to_what_environments_have_to_do():
    check_environment(LeducPoker, [{"seed": seed} for seed in range(6)], ["c", "r", "c", "f"])
