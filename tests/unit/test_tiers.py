"""Which tests `make test`, `make test-rest` and `make test-long` run: together all, and none twice by accident."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from _pytest.mark.expression import Expression
from drawing import drawn
from hypothesis import settings

ROOT = Path(__file__).parents[2]
MARKERS = ("ci", "slow", "more_examples", "model", "service", "browser", "faults", "frameworks", "libraries")
MARKERS += ("partners", "engines", "long")
OWN_COMMAND = {"long", "faults", "frameworks", "libraries", "partners", "engines"}
CASES = [set(chosen) for count in range(len(MARKERS) + 1) for chosen in itertools.combinations(MARKERS, count)]


def variables() -> dict[str, str]:
    """Return the variables of the Makefile, each with the others put in."""
    found = dict(re.findall(r"^([A-Z_]+) [:?]= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, value in found.items():
        found[name] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


def expressions(target: str) -> list[Expression]:
    """Return what each pytest of a target of the Makefile selects."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return [Expression.compile(variables()[name]) for name in re.findall(r'-m "\$\((\w+)\)"', recipe[1])]


def times(selected: list[Expression], markers: set[str]) -> int:
    """Return how often a test with these markers is run by commands that select so."""
    return sum(found.evaluate(lambda name, **_: name in markers) for found in selected)


def test_a_test_is_in_one_tier_or_has_a_command_of_its_own():
    quick, ci, rest, long = (expressions(target) for target in ("unit", "test-ci", "test-rest", "test-long"))
    for markers in CASES:
        alone = bool(markers & {"service", "browser"})
        drawn_again = int("more_examples" in markers and not alone)
        if markers & (OWN_COMMAND - {"long"}):
            wanted = (0, 0, 0, 0)
        elif "long" in markers:
            wanted = (0, 0, 0, 1)
        elif alone or markers & {"slow", "model"}:
            wanted = (0, 0, 1, drawn_again)
        else:
            wanted = (int("ci" not in markers), int("ci" in markers), 0, drawn_again)
        assert tuple(times(tier, markers) for tier in (quick, ci, rest, long)) == wanted, markers


def test_the_check_of_this_repository_builds_the_package_and_the_site_and_runs_the_readmes_tests():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make machine", "make wheel", "make docs-site", "make test", "make test-ci"]


def test_the_third_tier_draws_all_examples():
    before = settings.get_current_profile_name()
    try:
        for profile, wanted in (("quick", 2), ("full", 30), ("search", 30)):
            settings.load_profile(profile)
            assert drawn(2, 30) == wanted
    finally:
        settings.load_profile(before)
