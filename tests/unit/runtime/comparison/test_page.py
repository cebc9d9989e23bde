from __future__ import annotations

import re

import pytest

from palestra_lab.comparison.one_run import FAILED, write_record
from palestra_lab.comparison.page import write_page
from palestra_lab.comparison.results import read_results
from unit.runtime.comparison.grids import GRID, finish, planned, rows


def cells(text: str, first: str) -> list[str]:
    """The cells of the first row of a table that begins with this one: the numbers come before the settings."""
    line, *_ = re.findall(rf"^\| {re.escape(first)} \|.*$", text, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = GRID.replace("[3, 1]", "[0, 1, 2]").replace('name = "small"', 'name = "small"\nfindings = "It learns."')
    comparison, runs = planned(tmp_path, grid)
    finals = {"grpo": (0.8, 0.9, 0.7), "flat": (0.2, 0.4, 0.3)}
    for run in runs:
        final = finals[run.algorithm][run.seed]
        finish(run, rows((0, 0.1), (200, final / 2), (410 + run.seed, final), step_seconds=1.5))
    write_page(comparison, runs, read_results(runs), tmp_path / "page.md")
    return tmp_path / "page.md"


def test_the_table_has_the_numbers_of_the_runs(page):
    text = page.read_text()
    assert "6 of 6 runs are finished" in text
    head = cells(text, "algorithm")
    found = dict(zip(head, cells(text, "grpo"), strict=True))
    assert found["n"] == "3"
    assert found["untrained"] == "0.100"
    assert found["final"] == "0.800 ± 0.248"  # 4.303 * 0.1 / sqrt(3)
    assert found["reach 0.5"] == "3 of 3"
    assert found["tokens to 0.5"] == "411"
    assert found["seconds to 0.5"] == "3"
    assert found["tokens"] == "410 to 412"
    assert float(found["mean"]) == pytest.approx((0.1 + 0.4) / 4 + (0.4 + 0.8) / 4, abs=0.006)
    flat = dict(zip(head, cells(text, "flat"), strict=True))
    assert (flat["reach 0.5"], flat["tokens to 0.5"]) == ("0 of 3", "–")
    assert text.index("| grpo | 3") < text.index("| flat | 3")  # the best first


def test_a_pair_has_its_difference_and_its_tests(page):
    pair, n, difference, p, exact, corrected = cells(page.read_text(), "grpo − flat")
    assert (pair, n) == ("grpo − flat", "3")
    # Differences 0.6, 0.5, 0.4: mean 0.5, standard error 0.1 / sqrt(3); t = 8.66 with 2 degrees of freedom.
    assert difference == "+0.500 ± 0.248"
    assert (p, exact, corrected) == ("0.013", "0.250", "**0.013**")
    assert "Differences that hold at 0.05 after the correction for 1 pair: grpo over flat." in page.read_text()


def test_the_picture_lies_beside_the_page_and_has_its_name(page):
    assert (page.parent / "page-sums.png").read_bytes().startswith(b"\x89PNG")
    assert "](page-sums.png)" in page.read_text()
    assert "## What was found\n\nIt learns.\n" in page.read_text()


def test_settings_of_algorithms_are_said(page):
    assert '| flat | `grpo` | `advantage_scale = "none"`, `rollout.group_size = 2` | – |' in page.read_text()


def test_a_page_without_results_says_so_and_failures_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison, runs = planned(tmp_path)
    runs[0].folder.mkdir(parents=True)
    write_record(runs[0].record, runs[0].settings | {"state": FAILED, "reason": "no\nmemory"})
    write_page(comparison, runs, read_results(runs), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "0 of 4 runs are finished, 1 failed" in text
    assert "No run is finished." in text
    assert "- sums  grpo  seed 3: no memory" in text


def test_who_is_over_whom_follows_the_seeds_that_both_have(tmp_path, monkeypatch):
    """`flat` is better on every common seed; the seeds that only `grpo` has make its mean over all of them larger."""
    monkeypatch.chdir(tmp_path)
    comparison, runs = planned(tmp_path, GRID.replace("[3, 1]", "[0, 1, 2, 3, 4]"))
    finals = {"grpo": (0.10, 0.11, 0.12, 0.99, 0.99), "flat": (0.30, 0.312, 0.321)}
    for run in runs:
        if run.seed < len(finals[run.algorithm]):
            finish(run, rows((0, 0.1), (410, finals[run.algorithm][run.seed])))
    write_page(comparison, runs, read_results(runs), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.index("| grpo | 5") < text.index("| flat | 3")
    assert cells(text, "flat − grpo")[1:3] == ["3", "+0.201 ± 0.002"]
    assert "pair: flat over grpo." in text
