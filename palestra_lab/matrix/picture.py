"""The picture of a matrix: rewards of each pair as colours and numbers, and ratings with their intervals."""

from __future__ import annotations

import io
from pathlib import Path

from palestra.disk import write_whole
from palestra_lab.matrix.result import Matrix

_CELL, _LEAST = 0.72, 4.6  # inches
_FEW = 14  # players up to which each cell has its numbers written in it


def draw_matrix(matrix: Matrix, title: str, path: Path) -> None:
    """Draw a matrix and write the picture.

    Args:
        matrix: of finished games.
        title: heading of the picture.
        path: of the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order, count = matrix.order, len(matrix.players)
    side = max(_LEAST, _CELL * count + 1.6)
    figure = Figure(figsize=(side + 3.4, side), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    board, rating = figure.subplots(1, 2, width_ratios=(side, 3.0))
    cells = [[matrix.cell(row, column) for column in order] for row in order]
    means = [[float("nan") if cell is None else cell.mean for cell in line] for line in cells]
    known = [cell.mean for line in cells for cell in line if cell is not None]
    colours = board.imshow(means, cmap="RdYlGn", vmin=min(known, default=0.0), vmax=max(known, default=1.0))
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            if cell is not None and count <= _FEW:
                said = f"{cell.mean:.2f}" + ("" if cell.half is None else f"\n±{cell.half:.2f}")
                board.text(x, y, said, ha="center", va="center", fontsize="x-small")
    board.set_xticks(range(count), order, rotation=35, ha="right")
    board.set_yticks(range(count), order)
    board.set(title=title, xlabel="against", ylabel="mean reward of")
    board.tick_params(length=0)
    board.spines[:].set_visible(False)
    figure.colorbar(colours, ax=board, shrink=0.6, label="mean reward")
    rated = [(place, one) for place, name in enumerate(order) if (one := matrix.ratings[name]) is not None]
    elos, halves = [one.elo for _, one in rated], [one.half for _, one in rated]
    places = [place for place, _ in rated]
    rating.errorbar(elos, places, xerr=halves, fmt="o", color="#0072B2", ecolor="#9aa5b1", capsize=3)
    rating.set_yticks(range(count), order)
    rating.set_ylim(count - 0.5, -0.5)
    rating.axvline(0, color="#777777", ls=":", lw=1.0)
    rating.set(title="Elo", xlabel="mean of all: 0; 95 % intervals")
    rating.grid(axis="x", alpha=0.25)
    rating.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    write_whole(path, drawn.getvalue())
