"""An episode's calls to rows: Palestra's token trie, verifiers v1's message graph and tinker-cookbook, in turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import Part
from processes import HERE, ROOT, BenchError, run_json, run_json_lines, shown

TABLE = "Merging an episode's calls into rows, in M distinct tokens a second (M/s)"
CALL_TABLE = "What matching and inserting add to a model call, 500 tokens a turn"
CALL_PIECES = {"match": "match messages µs", "trie": "insert into trie µs", "history": "remember messages µs"}
# Merging is work of one thread; the runners import what they share from bench/.
ENVIRONMENT = {"PYTHONPATH": "bench", "OMP_NUM_THREADS": "1"}
SMALL, LARGE = "10^4 tokens", "10^6 tokens"  # between which the rate should not fall

Results = dict[tuple[str, str], list[dict[str, Any]]]  # by (case, way): a result for each round


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A runner, and the columns of the ways in which it merges."""

    name: str
    command: tuple[object, ...]
    columns: dict[str, str]  # by way


PALESTRA = Contestant(
    name="Palestra",
    command=(sys.executable, HERE / "merge_palestra.py"),
    columns={
        "recorded": "Palestra M/s",
        "unknown": "Palestra, nothing known M/s",
        "messages": "Palestra, messages too M/s",
    },
)
PEERS = [
    Contestant(
        name=name,
        command=(ROOT / ".venv-peers" / way / "bin" / "python", HERE / "peers" / f"merge_{way}.py"),
        columns={way: f"{name} M/s"},
    )
    for way, name in {"verifiers": "verifiers v1", "cookbook": "tinker-cookbook"}.items()
]
# What does the same work: verifiers matches messages, tinker-cookbook is given whole prompts and compares them.
RATIOS = {"verifiers": "messages", "cookbook": "unknown"}


def run(part: Part, quick: bool) -> None:
    """All contestants in turns, each round in another order, then the cost in a call."""
    field = [PALESTRA]
    for peer in PEERS:
        if ROOT.joinpath(str(peer.command[0])).exists():
            field.append(peer)
        else:
            part.notes.append(f"{peer.name} is skipped: it has no environment; bench/peers/README.md says how")
    arguments = ("--runs", 3, "--case-seconds", 3) if quick else ("--runs", 9, "--case-seconds", 20)
    results: Results = {}
    for number in range(1 if quick else 2):
        for one in field if number % 2 == 0 else reversed(field):
            for line in run_json_lines((*one.command, *arguments), ENVIRONMENT):
                results.setdefault((line["case"], line["way"]), []).append(line)
    check(results)
    for case in dict.fromkeys(case for case, _ in results):
        add_case(part, case, field, arguments, results)
    add_notes(part, field, results)
    add_call(part, quick)


def check(results: Results) -> None:
    """Ours have to be the ideal rows, token by token; a peer has to train every token that was sampled.

    Raises:
        BenchError: they are not.
    """
    for (case, way), found in results.items():
        for line in found:
            right = line["exact"] if way in PALESTRA.columns else line["trained"] == line["ideal"]["trained"]
            if line["seconds"] and not right:
                raise BenchError(f"{way} merges {case!r} wrongly: {line}")


def add_case(part: Part, case: str, field: Sequence[Contestant], arguments: tuple[object, ...], found: Results) -> None:
    """A row: every way's rate, rows where they are not the ideal ones, and how many times ours are as fast."""
    best = found[case, "recorded"][0]["ideal"]
    for one in field:
        command = shown((*one.command, *arguments), ENVIRONMENT)
        if one is PALESTRA:
            part.add(TABLE, case, command, distinct__tokens=[best["distinct"]], rows=[best["rows"]])
        for way, column in one.columns.items():
            part.add(TABLE, case, command, **{column: rates(found, case, way)})
        for way in one.columns.keys() & RATIOS.keys():
            ours, theirs = rates(found, case, RATIOS[way]), rates(found, case, way)
            if ours and theirs:
                times = statistics.median(ours) / statistics.median(theirs)
                part.add(TABLE, case, command, **{f"times {one.name}": [times]})


def add_notes(part: Part, field: Sequence[Contestant], found: Results) -> None:
    """How the rate changes with length, what was stopped, and what was not merged."""
    for way, column in PALESTRA.columns.items():
        small, large = rates(found, SMALL, way), rates(found, LARGE, way)
        if small and large:
            rate, times = statistics.median(large), statistics.median(large) / statistics.median(small)
            part.notes.append(f"{column}: {rate:.3g} at {LARGE}, {times:.2g} times that at {SMALL}")
    names = {way: one.name for one in field for way in one.columns}
    for (case, way), lines in found.items():
        for line in lines:
            if line["stopped"]:
                part.notes.append(f"{names[way]}, {case}: stopped {line['stopped']}")
        last, best = lines[-1], lines[-1]["ideal"]
        if last["seconds"] and not last["exact"]:
            part.notes.append(
                f"{names[way]}, {case}: {last['rows']} rows of {last['row_tokens']:,} tokens together, "
                f"where {best['rows']} of {best['row_tokens']:,} would do"
            )
    part.notes.append(
        "Palestra's rows are the ideal ones in every case, token by token; times verifiers: Palestra with messages "
        "matched; times tinker-cookbook: Palestra with nothing known"
    )


def add_call(part: Part, quick: bool) -> None:
    """Microseconds of the session's functions in one call."""
    command = (sys.executable, HERE / "merge_call.py", "--runs", 5 if quick else 15)
    for turn, pieces in run_json(command, ENVIRONMENT)["seconds"].items():
        columns = {column: [1e6 * value for value in pieces[piece]] for piece, column in CALL_PIECES.items()}
        together = [sum(values) for values in zip(*columns.values(), strict=True)]
        part.add(CALL_TABLE, f"turn {turn}", shown(command, ENVIRONMENT), **columns, **{"together µs": together})


def rates(found: Results, case: str, way: str) -> list[float]:
    """M distinct tokens a second, of all runs."""
    lines = found.get((case, way), [])
    return [line["ideal"]["distinct"] / seconds / 1e6 for line in lines for seconds in line["seconds"]]
