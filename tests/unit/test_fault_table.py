"""The table of faults in the docs: written from the results of runs, and read again where a part of it is run anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import report
from faults.cells import CELLS, KILL, NODE, WORKER, cell, impossible

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"
SUITE = """<testsuites><testsuite timestamp="{date}T10:00:00">{cases}</testsuite></testsuites>"""
FAILURE = '<failure message="no"/>'
AT_CLAIM, MID_STEP = (cell(WORKER, KILL, moment) for moment in ("at claim", "mid-step"))
BESIDE = "test_a_server_that_finds_damage_says_so[all]"


def results(folder: Path, date: str, *tests: tuple[str, float, bool]) -> Path:
    """What pytest writes of tests: their names, their seconds, and whether they passed."""
    cases = "".join(
        f'<testcase name="{name}" time="{seconds}">{"" if passed else FAILURE}</testcase>'
        for name, seconds, passed in tests
    )
    path = folder / f"{date}.xml"
    path.write_text(SUITE.format(date=date, cases=cases))
    return path


def of(one) -> str:
    return f"{report.OF_THE_TABLE}[{one.name}]"


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "faults.md"
    path.write_text(f"# Before\n\n{report.BEGIN}\n\nold\n\n{report.END}\nafter\n")
    return path


def test_a_part_that_is_run_anew_takes_the_place_of_its_own_results_alone(page, tmp_path):
    first = results(tmp_path, "2026-01-01", (of(AT_CLAIM), 12.4, True), (of(MID_STEP), 9.0, False), (BESIDE, 3.2, True))
    report.main([str(page), str(first)])
    text = page.read_text()
    assert text.startswith("# Before\n\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "| worker | SIGKILL | 12 s | not run | not run | FAILED | not run | not run | –[^1] | not run |" in text
    assert "2026-01-01: 2 of 3 tests passed, in 0 min." in text
    assert "| a server that finds damage says so (all) | 3 s |" in text

    second = results(tmp_path, "2026-02-02", (of(MID_STEP), 7.0, True), (of(cell(NODE, KILL, "at end")), 20.0, True))
    report.main(["--keep", str(page), str(second)])
    text = page.read_text()
    assert "| worker | SIGKILL | 12 s | not run | not run | 7 s | not run | not run | –[^1] | not run |" in text
    assert "| node | SIGKILL | not run | not run | 20 s |" in text
    assert "2026-01-01: 2 of 3 tests passed" in text
    assert "2026-02-02: 2 of 2 tests passed" in text
    assert text.count("| a server that finds damage says so (all) | 3 s |") == 1

    report.main([str(page), str(second)])
    assert "| worker | SIGKILL | not run |" in page.read_text()
    assert "2026-01-01" not in page.read_text()


def test_the_page_of_the_docs_is_read_as_it_was_written():
    found = report.read_page(PAGE.read_text())
    assert {name: str(result) for name, result in found.cells.items() if result.outcome != "passed"} == {}
    assert found.cells.keys() <= {one.name for one in CELLS if impossible(one) is None}
    assert len(found.cells) > 100
    assert found.runs
    assert found.besides
