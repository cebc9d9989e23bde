"""Each interval that the product shows holds the true value in 95 of 100 simulated samples, also of few values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from palestra.runtime.scores import Evaluation, TaskOutcome, estimate
from palestra_lab.comparison.differences import paired_difference
from palestra_lab.matrix.result import Game, Matrix, ratings_of

Interval = tuple[float, float]
SAMPLES = 1500
TOLERANCE = 0.02  # more than three standard errors of a share of 0.95 of so many samples


def scored(rewards: np.ndarray) -> Interval:
    outcomes = [TaskOutcome(task_id="t", episode_id="e", reward=float(reward), reason=None) for reward in rewards]
    found = Evaluation(outcomes=tuple(outcomes), complete=True).interval
    assert found is not None
    return found


def cell(rewards: np.ndarray) -> Interval:
    """Both seatings take turns."""
    games = [
        Game("b", "a", (-reward, reward)) if n % 2 else Game("a", "b", (reward, -reward))
        for n, reward in enumerate(rewards.tolist())
    ]
    found = Matrix(players=("a", "b"), roles=("first", "second"), games=tuple(games)).cell("a", "b")
    assert found is not None
    assert found.half is not None
    return found.mean - found.half, found.mean + found.half


def over_seeds(rewards: np.ndarray) -> Interval:
    found = estimate(rewards.tolist())
    assert found.half is not None
    return found.mean - found.half, found.mean + found.half


def of_pairs(rewards: np.ndarray) -> Interval:
    """What both have in common is in no difference."""
    common = np.arange(len(rewards)) * 10.0
    found = paired_difference((rewards + common).tolist(), common.tolist()).estimate
    assert found.half is not None
    return found.mean - found.half, found.mean + found.half


def shares(intervals: Iterator[Interval], truth: float) -> float:
    return float(np.mean([low <= truth <= high for low, high in intervals]))


@pytest.mark.parametrize("count", [2, 3, 5, 30])
@pytest.mark.parametrize("interval", [scored, cell, over_seeds, of_pairs])
def test_intervals_of_means(interval: Callable[[np.ndarray], Interval], count: int):
    draw = np.random.default_rng(count)
    found = shares((interval(draw.normal(0.3, 2.0, count)) for _ in range(SAMPLES)), 0.3)
    assert found == pytest.approx(0.95, abs=TOLERANCE)


@pytest.mark.parametrize("count", [5, 10, 20, 50])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_intervals_of_counts_of_ones(count: int, share: float):
    """Wilson's interval is right on average over the shares; for single ones it is near."""
    draw = np.random.default_rng(count)
    found = shares((scored((draw.random(count) < share).astype(float)) for _ in range(SAMPLES)), share)
    assert found >= 0.9


@pytest.mark.parametrize("games", [4, 20, 60])
@pytest.mark.parametrize("gap", [0.0, 200.0])
def test_intervals_of_ratings(games: int, gap: float):
    """Of players who stand apart by so many points, of whom each pair plays so many games."""
    draw = np.random.default_rng(games)
    elos = np.array([gap, 0.0, -gap])
    chance = 1 / (1 + 10 ** ((elos[None, :] - elos[:, None]) / 400))
    held = []
    for _ in range(150):
        won = np.triu(draw.binomial(games, chance), 1)
        points = won + np.triu(games - won, 1).T
        held += [
            abs(one.elo - elo) <= one.half for one, elo in zip(ratings_of(points.astype(float)), elos, strict=True)
        ]
    assert np.mean(held) >= 0.92
