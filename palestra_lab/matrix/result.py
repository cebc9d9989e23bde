"""Results of a matrix of games: mean rewards of each pair, and ratings.

A player with rating R wins against one with rating S with the probability 1 / (1 + 10 ** ((S - R) / 400)); a drawn game
counts as half a win for each (Bradley and Terry 1952; Elo 1978). Ratings of players who have won, or lost, everything
would be infinite, so each pair that has played gets one additional draw.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.disk import write_whole
from palestra.runtime.scores import estimate
from palestra.types.metrics import NORMAL_95

SCALE = 400.0 / math.log(10.0)  # Elo of one natural unit of log odds
DRAWN_MORE = 1.0  # games of each pair
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
    """Return the rating of each of P players, in order. `points`: [P, P], of the row's player against the column's: 1 a
    win, 0.5 a draw. The diagonal is not read.
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

    Of groups of the same size it is that of the first player. `games`: [P, P], number of games of each pair. The
    diagonal is 0.
    """
    largest: set[int] = set()
    for first in range(len(games)):
        reached, before = {first}, 0
        while len(reached) != before:
            before = len(reached)
            reached |= {int(other) for one in reached for other in np.flatnonzero(games[one])}
        largest = max(largest, reached, key=len)
    return sorted(largest)


@dataclass(frozen=True, slots=True)
class Game:
    """One game of two players.

    Attributes:
        rewards: of both, in this order; None: every attempt failed.
        replays: number of failed attempts that were retried.
    """

    first: str
    second: str
    rewards: tuple[float, float] | None
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One player's results against another, in both roles together.

    Attributes:
        half: half the width of the mean's 95 confidence interval, by Student's t; None: there is only one game, or all
            rewards are equal, so that it cannot be estimated.
    """

    mean: float
    half: float | None
    games: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half is None else f"{self.mean:.2f} ± {self.half:.2f}"


@dataclass(frozen=True)
class Matrix:
    """Results of every player against every other one.

    Attributes:
        players: in the order of rows and columns.
        roles: the two roles of the environment; every pair has played both assignments.
        games: all games.
    """

    players: tuple[str, ...]
    roles: tuple[str, str]
    games: tuple[Game, ...]

    def __repr__(self) -> str:
        """Return the number of games instead of the games."""
        counts = f"games={len(self.games)}, failed={self.failed}, replays={self.replays}"
        return f"Matrix(players={self.players!r}, {counts})"

    @property
    def failed(self) -> int:
        """Return the number of games without a result, because every attempt failed."""
        return sum(game.rewards is None for game in self.games)

    @property
    def replays(self) -> int:
        """Return the number of failed attempts that were retried."""
        return sum(game.replays for game in self.games)

    def cell(self, row: str, column: str) -> Cell | None:
        """Return the results of `row` against `column`; None: they have no finished game."""
        earned = [own for own, _ in self._rewards(row, column)]
        if not earned:
            return None
        found = estimate(earned)
        return Cell(found.mean, None if min(earned) == max(earned) else found.half, found.count)

    def points(self, row: str, column: str) -> float:
        """Return the points of `row` against `column`: 1 for a higher reward, 0.5 for an equal one."""
        return sum(0.5 if own == other else float(own > other) for own, other in self._rewards(row, column))

    @cached_property
    def ratings(self) -> dict[str, Rating | None]:
        """Return the Elo rating of each player; see `ratings_of`.

        Players with failed games may have no result against the others, not even through third ones. Only the largest
        connected group of players is rated; the others' rating is None.
        """
        points = np.array([[0.0 if a == b else self.points(a, b) for b in self.players] for a in self.players])
        rated = comparable(points + points.T)
        found: dict[str, Rating | None] = dict.fromkeys(self.players)
        if len(rated) > 1:
            names = [self.players[place] for place in rated]
            found.update(zip(names, ratings_of(points[np.ix_(rated, rated)]), strict=True))
        return found

    @property
    def order(self) -> list[str]:
        """Return the players, strongest first; those without a rating are last."""
        elos = {player: -math.inf if one is None else one.elo for player, one in self.ratings.items()}
        return sorted(self.players, key=lambda player: (-elos[player], self.players.index(player)))

    def lines(self) -> list[list[str]]:
        """Return the matrix as the cells of a table: a header, and a line for each player, strongest first."""
        header = ["player", "Elo", *self.order]
        found = [header]
        for row in self.order:
            rating = self.ratings[row]
            cells = ["" if row == column else str(self.cell(row, column) or "-") for column in self.order]
            found.append([row, "–" if rating is None else f"{rating.elo:+.0f} ± {rating.half:.0f}", *cells])
        return found

    def text(self) -> str:
        """Return the matrix as lines of text."""
        lines = self.lines()
        widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
        return "\n".join(_aligned(line, widths) for line in lines)

    def write_json(self, path: Path) -> None:
        """Write the whole matrix, with its games, as JSON."""
        write_whole(path, json.dumps(self.as_json(), indent=1).encode())

    def as_json(self) -> dict[str, Any]:
        """Return the matrix as JSON: ratings, cells and games."""
        pairs = [(a, b) for a in self.players for b in self.players if a != b]
        cells = {f"{a} / {b}": cell for a, b in pairs if (cell := self.cell(a, b)) is not None}
        return {
            "players": list(self.players),
            "roles": list(self.roles),
            "failed": self.failed,
            "replays": self.replays,
            "ratings": {name: one and {"elo": one.elo, "half": one.half} for name, one in self.ratings.items()},
            "cells": {name: {"mean": one.mean, "half": one.half, "games": one.games} for name, one in cells.items()},
            "games": [[game.first, game.second, game.rewards and list(game.rewards)] for game in self.games],
        }

    def _rewards(self, row: str, column: str) -> Iterator[tuple[float, float]]:
        """Yield the rewards (of `row`, of `column`) of each of their finished games."""
        for game in self.games:
            if game.rewards is None:
                continue
            if (game.first, game.second) == (row, column):
                yield game.rewards
            elif (game.second, game.first) == (row, column):
                yield game.rewards[::-1]


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
    return "  ".join([first, *rest]).rstrip()


_CELL, _LEAST = 0.72, 4.6  # inches
_FEW = 14  # players up to which each cell has its numbers written in it


def draw_matrix(matrix: Matrix, title: str, path: Path) -> None:
    """Draw a matrix and write the picture.

    Args:
        matrix: of finished games.
        title: heading of the picture.
        path: of the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order, count = matrix.order, len(matrix.players)
    side = max(_LEAST, _CELL * count + 1.6)
    figure = Figure(figsize=(side + 3.4, side), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    board, rating = figure.subplots(1, 2, width_ratios=(side, 3.0))
    cells = [[matrix.cell(row, column) for column in order] for row in order]
    means = [[float("nan") if cell is None else cell.mean for cell in line] for line in cells]
    known = [cell.mean for line in cells for cell in line if cell is not None]
    colours = board.imshow(means, cmap="RdYlGn", vmin=min(known, default=0.0), vmax=max(known, default=1.0))
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            if cell is not None and count <= _FEW:
                said = f"{cell.mean:.2f}" + ("" if cell.half is None else f"\n±{cell.half:.2f}")
                board.text(x, y, said, ha="center", va="center", fontsize="x-small")
    board.set_xticks(range(count), order, rotation=35, ha="right")
    board.set_yticks(range(count), order)
    board.set(title=title, xlabel="against", ylabel="mean reward of")
    board.tick_params(length=0)
    board.spines[:].set_visible(False)
    figure.colorbar(colours, ax=board, shrink=0.6, label="mean reward")
    rated = [(place, one) for place, name in enumerate(order) if (one := matrix.ratings[name]) is not None]
    elos, halves = [one.elo for _, one in rated], [one.half for _, one in rated]
    places = [place for place, _ in rated]
    rating.errorbar(elos, places, xerr=halves, fmt="o", color="#0072B2", ecolor="#9aa5b1", capsize=3)
    rating.set_yticks(range(count), order)
    rating.set_ylim(count - 0.5, -0.5)
    rating.axvline(0, color="#777777", ls=":", lw=1.0)
    rating.set(title="Elo", xlabel="mean of all: 0; 95 % intervals")
    rating.grid(axis="x", alpha=0.25)
    rating.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    write_whole(path, drawn.getvalue())
