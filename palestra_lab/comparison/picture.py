"""The picture of a scenario: validation reward over sampled tokens, with a line and a band for each algorithm."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.disk import write_whole
from palestra.runtime.statistics import Estimate, estimate
from palestra_lab.comparison.results import RunResult
from palestra_lab.config import ScenarioEntry

# Colours and dashes that stay apart in print and for most people with a colour vision deficiency (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Curve:
    """One algorithm's validations, averaged over its seeds at equal numbers of sampled tokens.

    Attributes:
        tokens: [N], from 0 on.
        rewards: [N], mean over seeds with its interval.
    """

    tokens: tuple[float, ...]
    rewards: tuple[Estimate, ...]


def curve_of(results: Sequence[RunResult], token_budget: int, places: int) -> Curve:
    """Return the curve of one algorithm.

    Runs validate after whole steps, so rewards are interpolated between validations.

    Args:
        places: number of points after the first, evenly over the budget; those beyond a seed's end are left out.
    """
    tokens, rewards = [], []
    for place in range(places + 1):
        at = token_budget * place / places
        values = [value for result in results if (value := result.at(at)) is not None]
        if len(values) == len(results):
            tokens.append(at)
            rewards.append(estimate(values))
    return Curve(tuple(tokens), tuple(rewards))


def draw_curves(scenario: ScenarioEntry, title: str, curves: Mapping[str, Curve], path: Path) -> None:
    """Draw the curves of a scenario's algorithms and write the picture.

    Args:
        scenario: its threshold and best possible reward are drawn as lines.
        curves: by algorithm.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8.8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        means = [reward.mean for reward in curve.rewards]
        axes.plot(curve.tokens, means, color=colour, ls=dash, lw=1.8, marker="o", ms=3, label=name)
        halves = [reward.half or 0.0 for reward in curve.rewards]
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        axes.fill_between(curve.tokens, low, high, color=colour, alpha=0.12, lw=0)
    axes.axhline(scenario.threshold, color="#777777", ls=":", lw=1.0)
    axes.annotate("threshold", (1.0, scenario.threshold), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                  fontsize="x-small", color="#777777")  # fmt: skip
    shown = [reward.mean for curve in curves.values() for reward in curve.rewards]
    if scenario.best is not None:
        axes.axhline(scenario.best, color="#222222", ls="--", lw=0.8)
        shown.append(scenario.best)
    if shown:
        # Bands of two or three seeds reach far beyond what rewards can be, and would make the curves flat.
        margin = 0.06 * (max([*shown, scenario.threshold]) - min([*shown, scenario.threshold]) or 1.0)
        axes.set_ylim(min([*shown, scenario.threshold]) - margin, max([*shown, scenario.threshold]) + margin)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="sampled tokens", ylabel="validation reward", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if curves:
        figure.legend(frameon=False, loc="outside right upper")
    drawn = io.BytesIO()
    figure.savefig(drawn)
    write_whole(path, drawn.getvalue())
