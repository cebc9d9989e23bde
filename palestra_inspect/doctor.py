"""`palestra doctor`: problems of a run, since when, what they mean and what to try."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command
from palestra.terminal import one_line, say
from palestra_inspect.paragraphs import say_paragraph

if TYPE_CHECKING:
    from palestra.types.summaries import Examination, Finding

LABEL = 10  # columns of the word before a text


def add_doctor(commands: Any) -> None:
    """Add the command `doctor`, which takes the folder of a run."""
    parser = add_command(
        commands,
        "doctor",
        _run,
        "say what goes wrong in a run, what it means, and what to try",
        "  palestra doctor runs/addition          # the run may be running\n"
        "  palestra doctor runs/addition --json   # for programs\n\n"
        "exit code: 0 nothing was found, 1 something was, or the job or all episodes failed before the first step, "
        "2 an error",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    """Print the run's findings; return 1 if there are any, or if all episodes failed before the first step."""
    from palestra.doctor.examination import examine  # reads a run store, which the client alone can't

    found = examine(arguments.run_dir)
    if arguments.json:
        say(json.dumps(found.model_dump(mode="json")))  # control characters of the terminal are escaped
    else:
        _print(arguments.run_dir, found)
    return 1 if found.findings or found.reason else 0


def _print(folder: Path, found: Examination) -> None:
    if found.damaged:
        say(f"damaged, and not looked at: the metrics of steps {', '.join(map(str, found.damaged))}")
    if not found.step:
        say(f"{folder}: no step is finished yet")
        if found.reason:
            _paragraph("failed", found.reason)
            _paragraph("all", f"palestra episodes {shlex.quote(str(folder))}")
        return
    from palestra.types.progress import of_steps

    number = len(found.findings)
    what = "nothing found" if not number else f"{number} finding{'s' if number > 1 else ''}"
    say(f"{folder}, step {of_steps(found.step, found.steps)}: {what}")
    if found.numerics:
        _paragraph("computed", ", ".join(f"{name} {value}" for name, value in found.numerics.items() if value))
    for finding in found.findings:
        say()
        whose = f"  policy {one_line(finding.policy)}" if finding.policy else ""
        say(f"{finding.code}{whose}  {_when(finding)}")
        _paragraph("seen", finding.seen)
        _paragraph("it means", finding.means)
        _paragraph("try", finding.remedy)
        if finding.episodes:
            _paragraph("episodes", ", ".join(finding.episodes))


def _when(finding: Finding) -> str:
    if finding.holds:
        return f"since step {finding.since}"
    if finding.since == finding.until:
        return f"in step {finding.since}, not any more"
    return f"from step {finding.since} to {finding.until}, not any more"


def _paragraph(label: str, text: str) -> None:
    """Print a text in lines next to its label, with control characters removed."""
    say_paragraph(f"  {label:<{LABEL}}", text)
