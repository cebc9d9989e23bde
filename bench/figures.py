"""What was measured: figures, the tables that are printed from them, and the JSON that is written."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One cell of a table: the values of its runs, and the command that gave them."""

    table: str
    row: str
    column: str  # with its unit
    values: tuple[float, ...]
    command: str

    @property
    def median(self) -> float:
        """Of the runs."""
        return statistics.median(self.values)

    @property
    def cell(self) -> str:
        """`median (min to max)`; the value alone where there is one."""
        if len(set(self.values)) == 1:
            return _short(self.median)
        return f"{_short(self.median)} ({_short(min(self.values))} to {_short(max(self.values))})"

    def record(self) -> dict[str, Any]:
        """As it is written to JSON."""
        return asdict(self) | {"median": self.median, "min": min(self.values), "max": max(self.values)}


@dataclass(kw_only=True, slots=True)
class Part:
    """One part of the benchmark."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)  # see machine.py

    def add(self, table: str, row: str, command: str, **columns: Sequence[float]) -> None:
        """Add figures to a row: one for each column that has values; `__` in its name stands for a space."""
        for column, values in columns.items():
            if values:
                name = column.replace("__", " ").replace("_per_", "/")
                self.figures.append(
                    Figure(table=table, row=row, column=name, values=tuple(map(float, values)), command=command)
                )

    def record(self) -> dict[str, Any]:
        """As it is written to JSON."""
        figures = [figure.record() for figure in self.figures]
        return {"machine": self.machine, "notes": self.notes, "figures": figures}


def show(part: Part, console: Console) -> None:
    """Print a part's tables, in Markdown, so that they can be taken into a document as they are."""
    for name in _distinct(figure.table for figure in part.figures):
        figures = [figure for figure in part.figures if figure.table == name]
        columns = _distinct(figure.column for figure in figures)
        cells = {(figure.row, figure.column): figure.cell for figure in figures}
        table = Table("", box=box.MARKDOWN)
        for column in columns:
            table.add_column(column, justify="right")
        for row in _distinct(figure.row for figure in figures):
            table.add_row(row, *(cells.get((row, column), "") for column in columns))
        console.print(f"\n**{name}**\n")
        console.print(table)
    for note in part.notes:
        console.print(f"- {note}")


def write(parts: Sequence[Part], path: Path) -> None:
    """Replace these parts in the file; those that were measured at another time stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {part.name: part.record() for part in parts}
    path.write_text(json.dumps(known, indent=1) + "\n")


def _distinct(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of its first appearance."""
    return list(dict.fromkeys(names))


def _short(value: float) -> str:
    """Three or four digits that mean something."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
