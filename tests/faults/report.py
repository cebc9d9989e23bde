"""Writes what `make test-faults` found into the measured part of docs/faults.md.

python -m faults.report docs/faults.md RESULTS.xml...    (pytest's --junitxml; several, where it was run in parts)
"""

from __future__ import annotations

import os
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.cells import CELLS, COMPONENTS, MOMENTS, PAST_THE_LEASE, SIGNALS, Cell, impossible

BEGIN, END = "<!-- measured by `make test-faults`; do not edit from here -->", "<!-- to here -->"
OF_THE_TABLE = "test_after_a_fault_the_job_ends_as_if_nothing_had_happened"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one test."""

    outcome: str  # "passed", "FAILED" or "not run"
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" if self.outcome == "passed" else self.outcome


def results(suites: Iterable[ElementTree.Element]) -> dict[str, Result]:
    """By the name of the test."""
    found = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "FAILED" if bad else "not run" if case.find("skipped") is not None else "passed"
        found[case.attrib["name"]] = Result(outcome=outcome, seconds=float(case.attrib["time"]))
    return found


def page(suites: Sequence[ElementTree.Element]) -> str:
    """The measured part."""
    found = results(suites)
    passed = sum(result.outcome == "passed" for result in found.values())
    minutes = sum(result.seconds for result in found.values()) / 60
    date = suites[0].attrib["timestamp"][:10]
    parts = f" (run in {len(suites)} parts)" if len(suites) > 1 else ""
    return "\n".join(
        [
            f"{machine()}; {date}: {passed} of {len(found)} tests passed, in {minutes:.0f} min{parts}.",
            "A time is of a cell that passed, from the start of its job to the last look at what it left.\n",
            *table(found),
            "",
            *(f"[^{number}]: Impossible: {reason}." for reason, number in reasons().items()),
            "\n## Besides the table\n",
            "| test | |",
            "|---|--:|",
            *(f"| {in_words(name)} | {result} |" for name, result in found.items() if OF_THE_TABLE not in name),
        ]
    )


def table(found: Mapping[str, Result]) -> Iterable[str]:
    """A line for each component and signal, a column for each moment."""
    yield f"| | | {' | '.join(moment.name for moment in MOMENTS)} |"
    yield f"|---|---|{'--:|' * len(MOMENTS)}"
    notes = reasons()
    for component in COMPONENTS:
        for number, name in SIGNALS.items():
            cells = [cell for cell in CELLS if (cell.component, cell.signal) == (component, number)]
            yield f"| {component} | {name} | {' | '.join(said(cell, found, notes) for cell in cells)} |"


def said(cell: Cell, found: Mapping[str, Result], notes: Mapping[str, int]) -> str:
    """What the table says of a cell."""
    if (reason := impossible(cell)) is not None:
        return f"–[^{notes[reason]}]"
    return str(found.get(f"{OF_THE_TABLE}[{cell.name}]", "not run"))


def reasons() -> dict[str, int]:
    """Why cells are impossible, numbered."""
    return {reason: number for number, reason in enumerate(dict.fromkeys(filter(None, map(impossible, CELLS))), 1)}


def in_words(name: str) -> str:
    """A test's name as a sentence."""
    sentence, _, case = name.removeprefix("test_").rstrip("]").partition("[")
    return sentence.replace("_", " ") + (f" ({case})" if case else "")


def explained() -> Iterable[str]:
    """Who is hurt, and when."""
    yield "| who | what that is | a SIGSTOP lasts |\n|---|---|---|"
    yield from (f"| {name} | {what} | {PAST_THE_LEASE[name]} |" for name, what in COMPONENTS.items())
    yield "\n| moment | its model server stands at | which is |\n|---|---|---|"
    yield from (f"| {moment.name} | `{moment.point}` | {moment.what} |" for moment in MOMENTS)


def machine() -> str:
    """Processor and cores."""
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores, no GPU"


def main(target: Path, *sources: Path) -> None:
    """Replace the measured part of `target`."""
    suites = [suite for source in sources for suite in ElementTree.parse(source).getroot().iter("testsuite")]
    text = target.read_text()
    found = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.S)
    assert found is not None, f"{target} has no measured part"
    measured = "\n".join([*explained(), "", page(suites)])
    target.write_text(f"{text[: found.start(1)]}\n{measured}\n\n{text[found.end(1) :]}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
