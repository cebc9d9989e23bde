"""Two agents in turns on one board."""

from __future__ import annotations

import pytest

from palestra_worlds import GomokuDuel
from unit.envs.playing import play, says


async def moves(task, *actions: str):
    """What is seen while the agents make these moves in turn."""
    left = iter(actions)
    return await play(GomokuDuel(), task, lambda observation: says(next(left)))


def ends(seen) -> dict[str, float]:
    return {one.agent: one.reward for one in seen if one.terminated}


async def test_each_sees_the_board_after_the_others_move_and_the_rules_once():
    seen = await moves({}, "1 1", "2 2", "1 2", "3 3", "1 3")
    assert [one.agent for one in seen[:5]] == ["agent", "opponent", "agent", "opponent", "agent"]
    texts = [one.content[0].text.splitlines() for one in seen[:5]]
    assert texts[0] == ["You are X. 3 in a row win. Move: row column, from 1 to 3.", "...", "...", "..."]
    assert texts[1] == ["You are O. 3 in a row win. Move: row column, from 1 to 3.", "X..", "...", "..."]
    assert texts[2] == ["X..", ".O.", "..."]
    assert texts[4] == ["XX.", ".O.", "..O"]
    assert ends(seen) == {"agent": 1.0, "opponent": 0.0}


async def test_an_agent_is_rewarded_for_its_own_last_move():
    seen = await moves({"first": "opponent"}, "1 1", "2 1", "1 2", "2 2", "3 3", "2 3")
    assert ends(seen) == {"agent": 1.0, "opponent": 0.0}
    by_id = {one.id: one for one in seen}
    for last in seen[-2:]:
        (parent,) = last.parents
        assert by_id[parent].agent == last.agent
        assert all(one.agent != last.agent or one.id == parent for one in seen[seen.index(by_id[parent]) : -2])


async def test_a_full_board_is_a_draw():
    seen = await moves({}, "1 1", "1 2", "1 3", "2 2", "2 1", "2 3", "3 2", "3 1", "3 3")
    assert ends(seen) == {"agent": 0.5, "opponent": 0.5}


@pytest.mark.parametrize("move", ["1 1", "4 4", "no idea"])
async def test_an_impossible_move_costs_who_made_it_and_is_no_win_of_the_other(move):
    assert ends(await moves({}, "1 1", move)) == {"opponent": -0.5, "agent": 0.5}


async def test_an_opponent_that_fails_at_once_leaves_the_agent_without_a_move():
    seen = await moves({"first": "opponent"}, "no idea")
    assert [(one.agent, one.reward, one.parents) for one in seen[1:]] == [
        ("opponent", -0.5, (seen[0].id,)),
        ("agent", 0.5, ()),
    ]


def test_a_board_that_can_not_be_played_is_refused():
    with pytest.raises(ValueError, match="be played"):
        GomokuDuel(size=3, to_win=4)
