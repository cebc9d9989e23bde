from __future__ import annotations

import time

import pytest

from palestra_worlds import Gomoku
from palestra_worlds.gomoku import Board


def play(task, *moves):
    game = Gomoku()
    game.reset(task)
    for move in moves:
        found = game.step(move)
    return found


def board(text: str, task=None) -> Gomoku:
    game = Gomoku()
    lines = text.split()
    game.reset({"size": len(lines)} | (task or {}))
    game._board._stones = [list(line) for line in lines]
    return game


@pytest.mark.parametrize(
    ("text", "move"),
    [("XX. O.O ...", "1 3"), ("X.. .X. OO.", "3 3"), ("..X .X. .OO", "3 1"), ("XO. XO. ...", "3,1")],
)
def test_three_in_any_direction_win(text, move):
    _, reward, terminated, truncated, info = board(text).step(move)
    assert (reward, terminated, truncated, info["result"]) == (1.0, True, False, "won")


def test_a_greedy_opponent_wins_when_it_can_and_blocks_when_it_must():
    _, reward, *_, info = board("OO. X.. ...", {"opponent": "greedy"}).step("3 3")
    assert (reward, info["result"]) == (0.0, "lost")
    seen, _, terminated, _, _ = board("X.. ... ...", {"opponent": "greedy"}).step("1 2")
    assert not terminated
    assert seen.splitlines()[0] == "XXO"


def test_a_full_board_is_a_draw_and_an_impossible_move_the_end():
    _, reward, terminated, _, info = board("XOX XOO OX.").step("3 3")
    assert (reward, terminated, info["result"]) == (0.5, True, "drawn")
    for move in ("1 1", "4 4", "0 1", "no idea"):
        _, reward, terminated, _, info = board("X.. ... ...").step(move)
        assert (reward, terminated, info["result"]) == (-0.5, True, "impossible")


def test_the_seed_of_the_task_decides_how_the_opponent_plays():
    moves = ("1 1", "5 5", "3 2")
    task = {"size": 6, "to_win": 5}
    found = {play(task | {"seed": seed}, *moves)[0] for seed in range(8)}
    assert len(found) > 4
    assert play(task | {"seed": 3}, *moves) == play(task | {"seed": 3}, *moves)


@pytest.mark.parametrize("task", [{"size": 3, "to_win": 4}, {"size": 20}, {"to_win": 1}])
def test_a_board_that_can_not_be_played_is_refused(task):
    with pytest.raises(ValueError, match="be played"):
        Gomoku().reset(task)


def test_a_move_of_many_digits_is_no_move_and_is_read_at_once():
    board = Board(3, 3)
    began = time.process_time()
    for text in ("1" * 65536, "1" * 5000 + " 1", "1 " + "1" * 5000, "1 1" * 20000):
        assert board.move(text) in (None, (0, 10), (0, 0))
    assert time.process_time() - began < 2.0
    assert board.move("row 2, column 3") == (1, 2)
