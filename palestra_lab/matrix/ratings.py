"""Elo ratings of players from their games: the Bradley-Terry model by maximum likelihood.

A player with rating R wins against one with rating S with the probability 1 / (1 + 10 ** ((S - R) / 400)); a drawn game
counts as half a win for each (Bradley and Terry 1952; Elo 1978). Ratings of players who have won, or lost, everything
would be infinite, so each pair that has played gets one additional draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SCALE = 400.0 / math.log(10.0)  # Elo of one natural unit of log odds
DRAWN_MORE = 1.0  # games of each pair
NORMAL_95 = 1.959964
_ITERATIONS, _CLOSE = 200, 1e-12


@dataclass(frozen=True, slots=True)
class Rating:
    """A player's strength.

    Attributes:
        elo: the mean of all players is 0.
        half: half the width of the 95 confidence interval.
    """

    elo: float
    half: float


def ratings_of(points: NDArray[np.float64]) -> list[Rating]:
    """Return the rating of each of P players, in order.

    Args:
        points: [P, P], of the row's player against the column's: 1 a win, 0.5 a draw. The diagonal is not read.
    """
    players = len(points)
    games = points + points.T
    np.fill_diagonal(games, 0.0)
    if len(comparable(games)) < players:
        raise ValueError("some of the players have no games with the others, so their ratings can't be compared")
    more = np.where(games > 0, DRAWN_MORE, 0.0)
    won, played = points + more / 2, games + more
    np.fill_diagonal(won, 0.0)
    strength = np.zeros(players)  # log odds
    for _ in range(_ITERATIONS):
        expected = played / (1.0 + np.exp(strength[None, :] - strength[:, None]))
        gradient = (won - expected).sum(axis=1)
        step = np.linalg.pinv(_information(played, strength)) @ gradient
        strength += step / max(1.0, float(np.abs(step).max()))  # a full step may overshoot far from the optimum
        strength -= strength.mean()
        if float(np.abs(step).max()) < _CLOSE:
            break
    variance = np.diag(np.linalg.pinv(_information(played, strength)))
    return [
        Rating(float(one) * SCALE, NORMAL_95 * math.sqrt(max(float(spread), 0.0)) * SCALE)
        for one, spread in zip(strength, variance, strict=True)
    ]


def _information(played: NDArray[np.float64], strength: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Fisher information [P, P] of the strengths [P]; its rows add up to 0, as only differences matter."""
    share = 1.0 / (1.0 + np.exp(strength[None, :] - strength[:, None]))
    between = played * share * (1.0 - share)
    found: NDArray[np.float64] = np.diag(between.sum(axis=1)) - between
    return found


def comparable(games: NDArray[np.float64]) -> list[int]:
    """Return the largest connected group of P players: each has met each other one, or through third ones.

    Of groups of the same size it is that of the first player.

    Args:
        games: [P, P], number of games of each pair. The diagonal is 0.
    """
    largest: set[int] = set()
    for first in range(len(games)):
        reached, before = {first}, 0
        while len(reached) != before:
            before = len(reached)
            reached |= {int(other) for one in reached for other in np.flatnonzero(games[one])}
        largest = max(largest, reached, key=len)
    return sorted(largest)
