"""Compute what perfect play brings against the opponent of recipes/gomoku.py: `python bench/perfect_gomoku.py`.

Expectimax: the player makes the best move, the opponent each free move with the same probability.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@cache
def perfect(board: str) -> float:
    """Return the reward that the best move of X brings on average; `board` is nine characters, row by row."""
    return max(_after(board[:i] + "X" + board[i + 1 :]) for i in range(9) if board[i] == ".")


def _after(board: str) -> float:
    """Return the expected reward of a board on which X has just moved."""
    if _has_row(board, "X"):
        return 1.0
    answers = [board[:i] + "O" + board[i + 1 :] for i in range(9) if board[i] == "."]
    if not answers:
        return 0.5
    return fmean(0.0 if _has_row(a, "O") else perfect(a) if "." in a else 0.5 for a in answers)


def _has_row(board: str, stone: str) -> bool:
    return any(all(board[place] == stone for place in line) for line in LINES)


if __name__ == "__main__":
    print(f"{perfect('.' * 9):.4f} a game")
