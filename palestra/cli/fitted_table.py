"""Tables fitted to the terminal: truncated texts end with an ellipsis, and important columns stay."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from palestra.terminal import one_line

BETWEEN = 2  # columns of the terminal between those of a table
SHORTEST, WORDS = 8, 24  # columns of the terminal that a cut cell has at least; one that has to be read


def fitted_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    right: Sequence[str] = (),
    cut: Sequence[str] = (),
    dropped: Sequence[str] = (),
) -> Table:
    """Return a borderless table that fits the terminal, as far as its columns allow.

    Args:
        cut: columns whose texts may be truncated, the least important first; the last one keeps some words.
        dropped: columns to leave out if that is not enough, the least important first.
    """
    texts = [[one_line(cell) for cell in row] for row in rows]
    sizes = {name: max(map(cell_len, (name, *(row[at] for row in texts)))) for at, name in enumerate(names)}

    def over() -> int:
        return sum(sizes.values()) + BETWEEN * (len(sizes) - 1) - width

    shortest = dict.fromkeys(cut, SHORTEST) | dict.fromkeys(cut[-1:], WORDS)
    least = {name: min(sizes[name], max(size, cell_len(name))) for name, size in shortest.items()}
    for name in dropped:
        if over() > sum(sizes[one] - least[one] for one in cut if one in sizes):
            del sizes[name]
    for name in cut:
        if name in sizes:
            sizes[name] = max(least[name], sizes[name] - max(over(), 0))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, size in sizes.items():
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left", max_width=size)
    for row in texts:
        table.add_row(*(Text(cell) for name, cell in zip(names, row, strict=True) if name in sizes))
    return table
