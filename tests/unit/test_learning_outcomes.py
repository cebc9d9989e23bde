"""Outcomes that `bench/learning.py` keeps: as long as the recipe's code and its number of steps are the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "bench" / "learning_outcomes.py"
RECIPE = '"""Learns."""\n\nRATE = 1  # so fast\n\n\ndef play():\n    """Play."""\n    return RATE\n'


@pytest.fixture
def outcomes(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("learning_outcomes", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "learning_outcomes", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "KEPT", tmp_path / "learned")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "walk.py").write_text(RECIPE)
    return module


def test_an_outcome_is_kept_until_code_or_steps_change(outcomes, tmp_path):
    rows = [{"step": 0, "validation/reward_mean": 0.25, "train/loss": 3.0}, {"step": 2, "train/reward_mean": 0.5}]
    made = outcomes.Outcome(
        seed=1,
        rows=rows,
        wall_seconds=2.0,
        cpu_seconds=1.0,
        peak_mib=3.0,
        load=0.5,
        shares=((0.25, 0.0), (1.0, 0.0)),
        parts={"left": [(0, 0.25)]},
    )
    outcomes.Kept("walk", "walk", 2).keep(made)
    found = outcomes.Kept("walk", "walk", 2).outcome(1)
    assert (found.validation(), found.sampled(), found.shares) == ([(0, 0.25)], [0.5], made.shares)
    assert [tuple(point) for point in found.parts["left"]] == [(0, 0.25)]
    assert outcomes.Kept("walk", "walk", 2).outcome(2) is None
    assert outcomes.Kept("walk", "walk", 3).outcome(1) is None
    recipe = tmp_path / "recipes" / "walk.py"
    recipe.write_text(RECIPE.replace("Learns.", "Learns more.").replace("  # so fast", ""))
    assert outcomes.Kept("walk", "walk", 2).outcome(1) is not None
    recipe.write_text(RECIPE.replace("RATE = 1", "RATE = 2"))
    assert outcomes.Kept("walk", "walk", 2).outcome(1) is None
