"""Ratings against closed forms and an independent optimizer; the matrix as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from palestra.config import dump_config, parse_config
from palestra.errors import NotFound
from palestra.types.metrics import NORMAL_95
from palestra_lab.matrix.play import versions_of
from palestra_lab.matrix.result import DRAWN_MORE, SCALE, Game, Matrix, draw_matrix, ratings_of


@given(won=st.integers(0, 40), lost=st.integers(0, 40))
def test_two_players_have_the_ratings_of_the_closed_form(won, lost):
    """With one drawn game more, the odds are (won + 1/2) / (lost + 1/2); the variance of log odds is 1/w + 1/l."""
    if not won + lost:
        return
    one, other = ratings_of(np.array([[0.0, won], [lost, 0.0]]))
    w, l = won + DRAWN_MORE / 2, lost + DRAWN_MORE / 2  # noqa: E741 - as in the formula
    assert one.elo - other.elo == pytest.approx(400 * math.log10(w / l), abs=1e-6)
    assert one.elo == pytest.approx(-other.elo, abs=1e-9)
    assert one.half == pytest.approx(NORMAL_95 * SCALE * math.sqrt(1 / w + 1 / l) / 2, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_ratings_are_the_maximum_of_the_likelihood_that_scipy_finds(seed):
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(seed)
    players = 6
    points = draw.integers(0, 30, (players, players)) + draw.integers(0, 2, (players, players)) / 2
    np.fill_diagonal(points, 0.0)
    points[0, 1:], points[1:, 0] = 40.0, 0.0  # one wins every game
    found = [rating.elo for rating in ratings_of(points)]
    games = points + points.T
    won = points + np.where(games > 0, DRAWN_MORE / 2, 0.0)

    def unlikely(strength: np.ndarray) -> float:
        gap = strength[None, :] - strength[:, None]
        return float((won * np.logaddexp(0.0, gap)).sum()) + float(strength.mean() ** 2)

    best = optimize.minimize(unlikely, np.zeros(players), method="BFGS", options={"gtol": 1e-8})
    assert np.allclose((best.x - best.x.mean()) * SCALE, found, atol=1e-2)
    assert max(found) == found[0]


def test_a_player_who_has_met_no_other_can_not_be_compared():
    points = np.zeros((4, 4))
    points[0, 1] = points[2, 3] = 1.0
    with pytest.raises(ValueError, match=r"games.*others"):
        ratings_of(points)
    points[1, 2] = 1.0  # a chain is enough
    assert len(ratings_of(points)) == 4


def test_equal_players_are_equal_and_intervals_shrink_with_games():
    few, many = (ratings_of(np.full((3, 3), games / 2)) for games in (10.0, 1000.0))
    assert [one.elo for one in few] == pytest.approx([0.0] * 3, abs=1e-9)
    assert many[0].half < few[0].half / 8


def matrix() -> Matrix:
    games = [
        *(Game("new", "old", (1.0, 0.0)) for _ in range(6)),
        *(Game("old", "new", (0.5, 0.5)) for _ in range(2)),
        Game("old", "new", None),
        *(Game("old", "random", (1.0, -0.5)) for _ in range(4)),
        *(Game("random", "new", (0.0, 1.0)) for _ in range(4)),
    ]
    return Matrix(players=("old", "random", "new"), roles=("agent", "opponent"), games=tuple(games))


def test_cells_have_means_of_both_seatings_and_failures_are_no_results():
    found = matrix()
    assert found.failed == 1
    cell = found.cell("new", "old")
    assert (cell.mean, cell.games) == (0.875, 8)
    deviation = np.std([1.0] * 6 + [0.5] * 2, ddof=1)
    assert cell.half == pytest.approx(2.3646243 * deviation / math.sqrt(8), rel=1e-6)  # Student's t, 7 degrees
    assert found.cell("old", "new").mean == 0.125
    assert (found.points("new", "old"), found.points("old", "new")) == (7.0, 1.0)
    assert (found.cell("old", "random").mean, found.cell("old", "random").half) == (1.0, None)
    assert found.cell("random", "old").mean == -0.5
    assert found.order == ["new", "old", "random"]


def test_the_table_names_the_strongest_first(tmp_path):
    lines = matrix().text().splitlines()
    assert lines[0].split() == ["player", "Elo", "new", "old", "random"]
    assert [line.split()[0] for line in lines[1:]] == ["new", "old", "random"]
    assert "0.88 ± 0.19" in lines[1]
    matrix().write_json(tmp_path / "matrix.json")
    read = json.loads((tmp_path / "matrix.json").read_text())
    assert read["cells"]["new / old"]["games"] == 8
    assert len(read["games"]) == 17
    assert set(read["ratings"]) == {"old", "random", "new"}


def test_a_player_whose_games_have_all_failed_has_no_rating_and_the_other_games_are_kept(tmp_path):
    games = [
        *matrix().games,
        Game("broken", "old", None),
        Game("new", "broken", None),
    ]
    found = Matrix(players=("broken", "old", "random", "new"), roles=("agent", "opponent"), games=tuple(games))
    assert found.ratings == {"broken": None} | matrix().ratings
    assert found.order == ["new", "old", "random", "broken"]
    assert found.text().splitlines()[-1].split() == ["broken", "–", "-", "-", "-"]
    read = found.as_json()
    assert read["ratings"]["broken"] is None
    assert read["cells"] == matrix().as_json()["cells"]
    draw_matrix(found, "four players", tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 0


def test_games_that_have_all_failed_rate_nobody():
    found = Matrix(players=("a", "b"), roles=("x", "y"), games=(Game("a", "b", None), Game("b", "a", None)))
    assert found.ratings == {"a": None, "b": None}
    assert found.text().splitlines()[1].split() == ["a", "–", "-"]


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path):
    draw_matrix(matrix(), "three players", tmp_path / "matrix.png")
    picture = imread(tmp_path / "matrix.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 600
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 20


def test_the_versions_of_a_run_are_those_of_every_policy_that_it_trains(tmp_path):
    policies = {"white": {}, "black": {}, "judge": {"frozen": True}}
    config = parse_config({"policies": policies, "roles": {"second": "black"}, "name": "duel"})
    (tmp_path / "config.toml").write_text(dump_config(config))
    (tmp_path / "run.db").touch()
    with pytest.raises(NotFound, match=r"'white'.*'black'.*yet"):
        versions_of(tmp_path)
    kept = ["checkpoints/black/step-000002", "checkpoints/white/step-000010", "checkpoints/white/step-000002"]
    for folder in (*kept, "pool/white@0"):
        (tmp_path / folder).mkdir(parents=True)
    assert versions_of(tmp_path) == {
        "white@0": str(tmp_path / "pool/white@0"),
        "white@2": str(tmp_path / "checkpoints/white/step-000002"),
        "white@10": str(tmp_path / "checkpoints/white/step-000010"),
        "black@2": str(tmp_path / "checkpoints/black/step-000002"),
    }
    assert list(versions_of(tmp_path, "black")) == ["black@2"]
