"""The page of a comparison: Markdown with a picture, a table of numbers and a table of differences a scenario."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from palestra import __version__
from palestra.disk import write_whole
from palestra.runtime.scores import Estimate, estimate
from palestra.terminal import one_line
from palestra_lab.comparison.differences import MOST_EXACT, Difference, holm, paired_difference
from palestra_lab.comparison.plan import PlannedRun
from palestra_lab.comparison.results import Results, RunResult, machine
from palestra_lab.config import ComparisonConfig, ScenarioEntry

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

    Runs validate after whole steps, so rewards are interpolated between validations. `places`: number of points after
    the first, evenly over the budget; those beyond a seed's end are left out.
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
    """Draw the curves of a scenario's algorithms and write the picture."""
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


MADE = "<!-- made by `palestra compare`; do not edit: texts for this page stand in compare.toml -->"
LEVEL = 0.05
HOW = """
Every run samples the same number of tokens for training, up to the end of its last step: that is what is equal, not the
number of steps or of seconds. The policy is scored greedily on the validation tasks before the first step, evenly over
the tokens, and after the last step. Curves are means over seeds; bands and `±` are 95 % confidence intervals of the
mean by Student's t. *Final* is the last validation, *best* the largest one of a run (which chance makes larger), *mean*
the area under the curve divided by the budget. Seconds are of whole steps, without validations and loading. Tokens and
seconds to the threshold are medians over seeds, among which one that never reaches it counts as the last.

Differences are of final validations, paired by seed: `p` is that of the paired t-test, `exact` that of the permutation
of signs (with n seeds it is never below 2 / 2ⁿ), `corrected` is `p` after Holm's correction for all pairs of the
scenario. Where the differences of all seeds are equal there is no t-test, and the exact p is corrected in its place.
"""


def write_page(comparison: ComparisonConfig, runs: Sequence[PlannedRun], results: Results, path: Path) -> None:
    """Write the page and its pictures, next to it with the page's name as prefix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"# {comparison.title}", MADE]
    parts += [text.strip() for text in (comparison.about,) if text]
    total, done = len(runs), results.done
    state = f"{done} of {total} runs are finished" + (f", {len(results.failures)} failed" if results.failures else "")
    parts.append(f"{state}. Palestra {__version__}, {'; '.join(results.machines) or machine()}.")
    if comparison.findings:
        parts += ["## What was found", comparison.findings.strip()]
    parts += ["## How it was measured", HOW.strip()]
    for key, scenario in comparison.scenarios.items():
        of_key = [run for run in runs if run.scenario == key]
        for policy in of_key[0].policies:
            whose, end = (f": {policy}", f"-{policy}") if policy else ("", "")
            title, picture = f"{scenario.title or key}{whose}", path.with_name(f"{path.stem}-{key}{end}.png")
            names = [name for name in comparison.algorithms if (key, name, policy) in results.finished]
            of_policy = {name: results.finished[key, name, policy] for name in names}
            curves = {
                name: curve_of(found, scenario.token_budget, comparison.evaluations)
                for name, found in of_policy.items()
            }
            if curves:
                draw_curves(scenario, title, curves, picture)
            parts += _scenario(scenario, title, of_key, of_policy, curves, picture.name)
    parts += ["## The algorithms", _algorithms(comparison)]
    if results.failures:
        failed = [f"- {failure.run.label}: {one_line(failure.reason)}" for failure in results.failures]
        parts += ["## Failed runs", "\n".join(failed)]
    write_whole(path, ("\n\n".join(parts) + "\n").encode())


def _scenario(
    scenario: ScenarioEntry,
    title: str,
    runs: Sequence[PlannedRun],
    found: Mapping[str, Sequence[RunResult]],
    curves: Mapping[str, Curve],
    picture: str,
) -> list[str]:
    """Return the paragraphs of one scenario, or of one of several policies that are trained in it."""
    config = runs[0].config
    models = ", ".join(policy.model for policy in config.policies.values())
    seeds = len({run.seed for run in runs})
    best = "" if scenario.best is None else f"; the best possible reward is {scenario.best:g}"
    facts = (
        f"Model: {models}. {scenario.token_budget:,} sampled tokens, {seeds} seed{'s' if seeds > 1 else ''}; threshold "
        f"{scenario.threshold:g}{best}."
    )
    parts = [f"## {title}", *([scenario.about.strip()] if scenario.about else ()), facts]
    if not found:
        return [*parts, "No run is finished."]
    numbers = _numbers(scenario, found, curves)
    parts += [f"![validation reward over sampled tokens: {title}]({picture})", numbers]
    if (differences := _differences(found)) is not None:
        parts += differences
    return parts


def _numbers(scenario: ScenarioEntry, found: Mapping[str, Sequence[RunResult]], curves: Mapping[str, Curve]) -> str:
    """Return the table of a scenario, the algorithm with the largest final reward first."""
    at = f"{scenario.threshold:g}"
    head = [
        "algorithm",
        "n",
        "untrained",
        "final",
        "best",
        "mean",
        f"reach {at}",
        f"tokens to {at}",
        f"seconds to {at}",
    ]
    rows = []
    for name in sorted(found, key=lambda name: -_final(found[name]).mean):
        results = found[name]
        reached = [result.first_at(scenario.threshold) for result in results]
        rows.append(
            [
                name,
                str(len(results)),
                f"{estimate([result.points[0].reward for result in results]).mean:.3f}",
                _interval(_final(results)),
                _interval(estimate([result.best for result in results])),
                _area(curves[name], scenario.token_budget),
                f"{sum(point is not None for point in reached)} of {len(results)}",
                _middle([math.inf if point is None else point.tokens for point in reached]),
                _middle([math.inf if point is None else point.seconds for point in reached]),
                _range([result.tokens for result in results]),
                f"{estimate([result.seconds for result in results]).mean:,.0f}",
            ]
        )
    return _table([*head, "tokens", "seconds"], rows)


def _differences(found: Mapping[str, Sequence[RunResult]]) -> list[str] | None:
    """Return the paragraphs about the differences of all pairs of algorithms; None: no pair has two common seeds."""
    pairs: list[tuple[str, str, Difference]] = []
    ranked = sorted(found, key=lambda name: -_final(found[name]).mean)
    for first, second in itertools.combinations(ranked, 2):
        finals = [{result.seed: result.final for result in found[name]} for name in (first, second)]
        seeds = sorted(set(finals[0]) & set(finals[1]))
        if len(seeds) > 1:
            values = [[final[seed] for seed in seeds] for final in finals]
            difference = paired_difference(*values)
            # The rank is by all seeds of each, and the difference by those that both have: its sign decides.
            if difference.estimate.mean < 0:
                first, second, difference = second, first, paired_difference(*values[::-1])
            pairs.append((first, second, difference))
    if not pairs:
        return None
    rows, real = [], []
    for (first, second, each), p in zip(pairs, holm([each.p for *_, each in pairs]), strict=True):
        rows.append([f"{first} − {second}", str(each.estimate.count), _interval(each.estimate, sign="+"),
                     _p(each.p_t), _p(each.p_exact), f"**{_p(p)}**" if p < LEVEL else _p(p)])  # fmt: skip
        if p < LEVEL:
            real.append(f"{first} over {second}")
    said = f"Differences that hold at {LEVEL:g} after the correction for {len(pairs)} pair{'s' * (len(pairs) > 1)}: "
    said += ("; ".join(real) if real else "none") + "."
    if max(each.estimate.count for *_, each in pairs) > MOST_EXACT:
        said += f" The exact test is left out over {MOST_EXACT} seeds, but where all differences are equal."
    return [said, _table(["pair", "n", "difference", "p", "exact", "corrected"], rows)]


def _algorithms(comparison: ComparisonConfig) -> str:
    """Return the table that describes each algorithm, with settings of single scenarios."""
    rows = []
    for key, entry in comparison.algorithms.items():
        tuned = [
            f"{name}: {_assignments(scenario.tuned[key].settings | scenario.tuned[key].overrides)}"
            for name, scenario in comparison.scenarios.items()
            if key in scenario.tuned
        ]
        rows.append(
            [key, f"`{entry.name or key}`", _assignments(entry.settings | entry.overrides), "; ".join(tuned) or "–"]
        )
    return _table(["key", "algorithm.name", "settings", "in one scenario only"], rows, left=4)


def _final(results: Sequence[RunResult]) -> Estimate:
    return estimate([result.final for result in results])


def _area(curve: Curve, token_budget: int) -> str:
    """Return the mean reward over tokens by the trapezoid rule; a dash where a seed has not sampled the budget."""
    if not curve.tokens or curve.tokens[-1] < token_budget:
        return "–"
    means = [reward.mean for reward in curve.rewards]
    area = sum(
        (after - before) * (low + high) / 2
        for before, after, low, high in zip(curve.tokens, curve.tokens[1:], means, means[1:], strict=False)
    )
    return f"{area / token_budget:.3f}"


def _interval(found: Estimate, sign: str = "") -> str:
    half = "" if found.half is None else f" ± {found.half:.3f}"
    return f"{found.mean:{sign}.3f}{half}"


def _middle(values: Sequence[float]) -> str:
    middle = median(values)
    return f"{middle:,.0f}" if math.isfinite(middle) else "–"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _assignments(table: Mapping[str, Any], above: str = "") -> str:
    """Return nested tables as `a.b = 1, c = "x"`, for a cell."""
    parts = []
    for key, value in table.items():
        if isinstance(value, dict):
            parts.append(_assignments(value, f"{above}{key}."))
        else:
            parts.append(f"`{above}{key} = {json.dumps(value)}`")
    return ", ".join(part for part in parts if part) or "–"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table in Markdown."""
    rule = ["---" if number < left else "--:" for number in range(len(head))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rule, *rows))
