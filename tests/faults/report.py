"""Writes what `make test-faults` found into the measured part of docs/reference/faults.md.

python -m faults.report docs/reference/faults.md RESULTS.xml...    (pytest's --junitxml; several, if run in parts)
python -m faults.report --keep docs/reference/faults.md RESULTS.xml...

With `--keep`, tests that these runs do not have keep what the page says of them, and the runs that it tells of stay.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.cells import CELLS, COMPONENTS, MOMENTS, PAST_THE_LEASE, SIGNALS, Cell, cell, impossible

BEGIN, END = "<!-- measured by `make test-faults`; do not edit from here -->", "<!-- to here -->"
OF_THE_TABLE = "test_after_a_fault_the_job_ends_as_if_nothing_had_happened"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one test."""

    outcome: str  # "passed" or "FAILED"
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s" if self.outcome == "passed" and self.seconds else self.outcome

    @classmethod
    def read(cls, said: str) -> Result:
        """The result of which a page says this."""
        seconds = re.fullmatch(r"(\d+) s", said)
        return cls(outcome="passed" if seconds else said, seconds=float(seconds[1]) if seconds else 0.0)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page tells of earlier runs.

    Attributes:
        runs: a line of each.
        cells: by the name of the cell.
        besides: of tests that have no place in the table, by their sentences.
    """

    runs: Sequence[str] = ()
    cells: Mapping[str, Result] = field(default_factory=dict)
    besides: Mapping[str, Result] = field(default_factory=dict)


def read_page(text: str) -> Page:
    """What the measured part of a page tells. Cells that were not run, or are impossible, are left out."""
    cells, besides = dict[str, Result](), dict[str, Result]()
    names = [moment.name for moment in MOMENTS]
    for line in text.splitlines():
        words = [word.strip() for word in line.strip("|").split("|")]
        if len(words) == len(names) + 2 and words[0] in COMPONENTS:
            for moment, said in zip(names, words[2:], strict=True):
                if said != "not run" and not said.startswith("–"):
                    cells[_cell_name(words[0], words[1], moment)] = Result.read(said)
        elif len(words) == 2 and re.fullmatch(r"\d+ s|FAILED", words[1]):
            besides[words[0]] = Result.read(words[1])
    return Page(runs=re.findall(r"^.+ tests passed, in .+$", text, re.M), cells=cells, besides=besides)


def _cell_name(component: str, signal: str, moment: str) -> str:
    (number,) = (number for number, name in SIGNALS.items() if name == signal)
    return cell(component, number, moment).name


def results(suites: Iterable[ElementTree.Element]) -> dict[str, Result]:
    """By the name of the test."""
    found = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        if case.find("skipped") is not None:
            continue
        outcome = "FAILED" if case.find("failure") is not None or case.find("error") is not None else "passed"
        found[case.attrib["name"]] = Result(outcome=outcome, seconds=float(case.attrib["time"]))
    return found


def page(suites: Sequence[ElementTree.Element], before: Page) -> str:
    """The measured part; what the suites do not have is as `before`."""
    found = results(suites)
    of_cells = {name: result for name, result in found.items() if OF_THE_TABLE in name}
    kept = {f"{OF_THE_TABLE}[{name}]": result for name, result in before.cells.items()}
    besides = {in_words(name): result for name, result in found.items() if OF_THE_TABLE not in name}
    return "\n".join(
        [
            *before.runs,
            run(suites, found),
            "A time is of a cell that passed, from the start of its job to the last look at what it left.\n",
            *table(kept | of_cells),
            "",
            *(f"[^{number}]: Impossible: {reason}." for reason, number in reasons().items()),
            "\n## Besides the table\n",
            "| test | |",
            "|---|--:|",
            *(f"| {sentence} | {result} |" for sentence, result in (dict(before.besides) | besides).items()),
        ]
    )


def run(suites: Sequence[ElementTree.Element], found: Mapping[str, Result]) -> str:
    """A line that says when and where these were run, and how many tests passed."""
    passed = sum(result.outcome == "passed" for result in found.values())
    minutes = sum(result.seconds for result in found.values()) / 60
    date = suites[0].attrib["timestamp"][:10]
    parts = f" (run in {len(suites)} parts)" if len(suites) > 1 else ""
    return f"{machine()}; {date}: {passed} of {len(found)} tests passed, in {minutes:.0f} min{parts}."


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace the measured part of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--keep", action="store_true", help="what the page says of other tests")
    wanted = parser.parse_args(arguments)
    suites = [suite for source in wanted.results for suite in ElementTree.parse(source).getroot().iter("testsuite")]
    text = wanted.page.read_text()
    found = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.S)
    assert found is not None, f"{wanted.page} has no measured part"
    measured = "\n".join([*explained(), "", page(suites, read_page(found[1]) if wanted.keep else Page())])
    wanted.page.write_text(f"{text[: found.start(1)]}\n{measured}\n\n{text[found.end(1) :]}")


if __name__ == "__main__":
    main()
