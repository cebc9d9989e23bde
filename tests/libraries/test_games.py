"""PettingZoo and TextArena, the real ones, as environments of several agents."""

from __future__ import annotations

import sys

import pytest
from unit.envs.playing import play, says

from libraries.child import FOLDER
from palestra.errors import ConfigError
from palestra_inspect.environment_check import check_environment
from palestra_worlds import PettingZooEnvironment, TextArenaEnvironment

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """The libraries stand behind Palestra's own packages, as for the other tests of this folder."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    for library in ("pettingzoo", "textarena"):
        pytest.importorskip(library)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "classic/connect_four_v3"},
        {"name": "classic/rps_v2", "options": {"max_cycles": 3}},
        {"name": "classic/rps_v2", "options": {"max_cycles": 3}, "parallel": True},
        {"name": "classic/leduc_holdem_v4"},
    ],
)
def test_worlds_of_pettingzoo_keep_to_what_environments_have_to_do(settings):
    check_environment(lambda: PettingZooEnvironment(**settings), [{"seed": 1}, {"seed": 2}])


async def test_a_board_of_planes_is_shown_as_characters():
    left = iter(["0", "3", "1", "4", "2"])
    seen = await play(PettingZooEnvironment(), {"seed": 1}, lambda observation: says(next(left)))
    shown = [one.content[0].text for one in seen if not one.is_last]
    assert shown[0] == "...\n...\n..."
    assert shown[1] == "1..\n...\n..."
    assert shown[2] == "01.\n...\n..." or shown[2] == "0..\n1..\n..."
    assert [one.choices for one in seen][1] == ("1", "2", "3", "4", "5", "6", "7", "8")
    assert {one.agent: one.reward for one in seen if one.is_last} == {"player_1": 1.0, "player_2": -1.0}


@pytest.mark.parametrize("parallel", [True, False])
async def test_rock_paper_scissors_pays_the_same_in_both_forms(parallel):
    environment = PettingZooEnvironment(name="classic/rps_v2", options={"max_cycles": 2}, parallel=parallel)
    moves = {"player_0": "0", "player_1": "1"}  # rock, paper
    seen = await play(environment, {"seed": 1}, lambda observation: says(moves[observation.agent]))
    earned = {role: sum(one.reward or 0 for one in seen if one.agent == role) for role in moves}
    assert earned == {"player_0": -2.0, "player_1": 2.0}
    assert all(one.truncated for one in seen if one.is_last)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "tictactoe_v3"}, "can't make 'tictactoe_v3'"),
        ({"name": "classic/no_such"}, "can't make 'classic/no_such' in its AEC form"),
        ({"parallel": True}, "in its parallel form"),
        ({"options": {"speed": 1}}, "can't make 'classic/tictactoe_v3'"),
    ],
)
def test_what_pettingzoo_can_not_make_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        PettingZooEnvironment(**settings)


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("TicTacToe-v0", ["[4]", "[0]", "[8]"]),
        ("IteratedPrisonersDilemma-v0", ["[cooperate]", "[defect]"]),
        ("KuhnPoker-v0", ["[check]", "[bet]", "[call]"]),
    ],
)
def test_games_of_textarena_keep_to_what_environments_have_to_do(name, actions):
    check_environment(lambda: TextArenaEnvironment(id=name), [{"seed": 1}, {"seed": 2}], actions)


async def test_a_game_of_textarena_is_played_to_its_end():
    left = iter(["[0]", "[3]", "[1]", "[4]", "[2]"])
    seen = await play(TextArenaEnvironment(), {"seed": 1}, lambda observation: says(next(left)))
    assert {one.agent: one.reward for one in seen if one.is_last} == {"player-0": 1.0, "player-1": -1.0}


def test_a_game_that_textarena_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="'NoSuch-v0'"):
        TextArenaEnvironment(id="NoSuch-v0")
