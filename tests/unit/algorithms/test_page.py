"""docs/explanation/algorithms.md has every algorithm and loss, with the formula and the paper that the code states."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from palestra.algorithms.loss import LOSSES
from palestra.algorithms.registry import ALGORITHMS

PAGE = (Path(__file__).parents[3] / "docs" / "explanation" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_on_the_page_as_the_code_describes_it(name):
    section = PAGE.partition(f"### `{name}`\n")[2].partition("\n#")[0]
    about = ALGORITHMS[name].about
    for text in (about.formula, about.paper, *about.needs):
        assert text in section
    assert f"| [`{name}`](#{name}) | {about.summary} |" in PAGE


def test_every_loss_that_ships_is_on_the_page_with_its_parameters():
    for name, loss in LOSSES.items():
        if loss.__module__.startswith("palestra."):
            line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
            names = [field.name for field in fields(loss)]
            assert all(f"`{each}`" in line for each in names) or line.endswith("| the same |")
