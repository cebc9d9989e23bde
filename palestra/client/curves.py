"""Curves of a job in a notebook, drawn again after each step; matplotlib and IPython are imported when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from palestra.types.metrics import names_of_policies

REWARDS = ("train/reward_mean", "validation/reward_mean")


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = f"curves in a notebook need {package}, which is not installed: pip install {package}"
        raise ModuleNotFoundError(missing, name=package) from error


class LiveCurves:
    """A figure with one curve a metric, over steps."""

    def __init__(self, metrics: Sequence[str], title: str) -> None:
        """Make the figure, with no points yet.

        Args:
            metrics: names of what is drawn, in order.
            title: of the figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        figures, canvas = (
            _import("matplotlib.figure", "matplotlib"),
            _import("matplotlib.backends.backend_agg", "matplotlib"),
        )
        self.figure: Any = figures.Figure(figsize=(7.2, 3.6), layout="constrained")
        canvas.FigureCanvasAgg(self.figure)
        self._axes = self.figure.subplots()
        self._metrics, self._title = tuple(metrics), title
        self._rows: dict[int, Mapping[str, float]] = {}
        self._display: Any = None
        self._draw()

    def show(self) -> None:
        """Show the figure below the cell of a notebook; later points change it there.

        Raises:
            ModuleNotFoundError: IPython is not installed.
        """
        self._display = _import("IPython.display", "ipython").display(self.figure, display_id=True)

    def add(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Add rows of metrics, and draw; a step that is known gets its new row."""
        self._draw_if_new(self._rows | {int(row["step"]): row for row in rows})

    def replace(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Draw these rows in place of all earlier ones: a job that was resumed has fewer of them."""
        self._draw_if_new({int(row["step"]): row for row in rows})

    def _draw_if_new(self, rows: dict[int, Mapping[str, float]]) -> None:
        if rows != self._rows:
            self._rows = rows
            self._draw()
            if self._display is not None:
                self._display.update(self.figure)

    def _draw(self) -> None:
        self._axes.clear()
        # Of several trained policies each has a curve.
        names = [whole for name in self._metrics for whole in names_of_policies(self._rows.values(), name)]
        for name in names:
            points = [(step, row[name]) for step, row in sorted(self._rows.items()) if name in row]
            if points:
                steps, values = zip(*points, strict=True)
                self._axes.plot(steps, values, marker=".", label=name)
        if self._axes.lines:
            self._axes.legend(frameon=False)
        self._axes.set(title=self._title, xlabel="training step")
        self._axes.grid(axis="y", alpha=0.25)
