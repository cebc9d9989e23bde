"""A comparison of jobs that train several policies: each by its own rewards, or those that the scenario names."""

from __future__ import annotations

import pytest

from palestra.errors import ConfigError
from palestra_lab.comparison.one_run import folders_with_checkpoints
from palestra_lab.comparison.page import write_page
from palestra_lab.comparison.progress import reached
from palestra_lab.comparison.results import Point, read_results
from palestra_lab.comparison.submitted import newest_below
from unit.runtime.comparison import grids
from unit.runtime.comparison.grids import GRID, finish, planned, rows

JOB = """
steps = 7
[environment]
name = "kuhn-poker"
validation_tasks = 4
[policies.white]
model = "tiny-random"
[policies.black]
model = "tiny-random"
[roles]
first = "white"
second = "black"
"""


@pytest.fixture
def of_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grids, "JOB", JOB)
    return tmp_path


def opposed(*points):
    """Rows of two policies: what one earns the other loses."""
    return [
        {
            **{name: value for name, value in row.items() if name != "validation/reward_mean"},
            "white/validation/reward_mean": row["validation/reward_mean"],
            "black/validation/reward_mean": -row["validation/reward_mean"],
        }
        for row in rows(*points)
    ]


def test_each_policy_is_compared_by_its_own_rewards(of_two):
    comparison, runs = planned(of_two)
    for run in runs:
        final = 0.4 if run.algorithm == "grpo" else 0.1
        finish(run, opposed((0, 0.0), (400, final + run.seed / 100)))
    found = read_results(runs)
    assert set(found.finished) == {("sums", a, p) for a in ("grpo", "flat") for p in ("white", "black")}
    assert found.done == len(runs) == 4
    white, black = found.finished["sums", "grpo", "white"][0], found.finished["sums", "grpo", "black"][0]
    assert white.points[0] == Point(0.0, 0.0, 0.0)
    assert white.points[1] == Point(400, 2.0, pytest.approx(0.41))
    assert black.final == -white.final
    assert reached(runs[0].folder) == "validation white 0.00 → 0.43, black -0.00 → -0.43 after 400 tokens"
    page = of_two / "page.md"
    write_page(comparison, runs, found, page)
    text = page.read_text()
    assert "4 of 4 runs are finished" in text
    first, second = (text.index(f"## sums: {name}") for name in ("white", "black"))
    assert "grpo | 2 | 0.000 | 0.420" in text[first:second]
    assert text[first:second].index("| grpo |") < text[first:second].index("| flat |")
    assert text[second:].index("| flat |") < text[second:].index("| grpo |")  # black has lost less there
    for name in ("white", "black"):
        assert (of_two / f"page-sums-{name}.png").stat().st_size > 1000


def test_a_scenario_may_name_the_policies_that_it_compares(of_two):
    grid = GRID.replace("threshold = 0.5", 'threshold = 0.5\npolicies = ["black"]')
    _, runs = planned(of_two, grid)
    made = opposed((0, 0.0), (400, 0.4))
    del made[-1]["white/validation/reward_mean"]  # white may have failed: it is not compared
    finish(runs[0], made)
    assert [(key, found[0].final) for key, found in read_results(runs).finished.items()] == [
        (("sums", "grpo", "black"), -0.4)
    ]
    with pytest.raises(ConfigError, match=r"scenarios\.sums\.policies.*'red'.*'white'.*'b"):
        planned(of_two, GRID.replace("threshold = 0.5", 'threshold = 0.5\npolicies = ["red"]'))


def test_a_validation_that_has_scored_nothing_for_a_policy_fails_the_run(of_two):
    _, runs = planned(of_two)
    made = opposed((0, 0.0), (400, 0.4))
    del made[-1]["black/validation/reward_mean"]
    finish(runs[0], made)
    found = read_results(runs[:1])
    assert [failure.reason for failure in found.failures] == [
        "none of the episodes of its last validation was scored for 'black'"
    ]
    assert not found.finished


def test_the_newest_checkpoint_of_each_policy_is_kept(tmp_path):
    folders = [tmp_path / "white/step-000001", tmp_path / "white/step-000002", tmp_path / "black/step-000002"]
    for folder in folders:
        folder.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    assert folders_with_checkpoints(tmp_path) == [tmp_path, tmp_path / "black", tmp_path / "white"]
    assert folders_with_checkpoints(tmp_path / "white") == [tmp_path / "white"]
    assert folders_with_checkpoints(tmp_path / "none") == [tmp_path / "none"]
    files = [f"checkpoints/{folder.relative_to(tmp_path)}/model.safetensors" for folder in folders]
    assert newest_below([*files, "metrics.jsonl"]) == (
        "checkpoints/white/step-000002/",
        "checkpoints/black/step-000002/",
    )
    alone = ["checkpoints/step-000009/model.safetensors", "checkpoints/step-000010/model.safetensors"]
    assert newest_below(alone) == ("checkpoints/step-000010/",)
