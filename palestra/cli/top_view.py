"""`palestra top` for runs: a line for each, and curves, episodes and calls of the one that changed last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, select

from palestra.cli.episode_list import rewards_of
from palestra.cli.fitted_table import fitted_table
from palestra.dashboard.answers import RunAnswer, SlowCall
from palestra.dashboard.progress import describe_run
from palestra.dashboard.runs import DAMAGED, Run
from palestra.dashboard.slow_calls import slow_calls
from palestra.errors import PalestraError
from palestra.store.browsing import EpisodeSummary
from palestra.store.run_log import readable_metrics
from palestra.store.search import readable_summaries
from palestra.store.tables import episodes
from palestra.terminal import one_line
from palestra.types.metrics import names_of_policies
from palestra.types.progress import duration

BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("train/reward_mean", "reward"),
    ("validation/reward_mean", "validation"),
    ("train/entropy", "entropy"),
    ("train/grad_norm", "gradient"),
    ("rollout/tokens_per_second", "tokens/s"),
    ("time/step_seconds", "step, s"),
)
NEWEST = 8  # episodes
LABEL = 12
BROADEST = 200  # columns of a curve


def view_of(runs: Sequence[Run], width: int, now: float) -> RenderableType:
    """Return the drawing; a run that can't be read says why.

    Args:
        now: Unix seconds.
    """
    found = [describe_run(run) for run in runs]
    newest = max(range(len(runs)), key=lambda place: (found[place].state == "running", found[place].changed_at or 0.0))
    return Group(_table(found, width, now), Text(), *_one(runs[newest], width, now))


def _table(found: Sequence[RunAnswer], width: int, now: float) -> Table:
    names = ("run", "state", "step", "reward", "validation", "left", "warnings", "changed")
    rows = [
        (
            one.title,
            one.state if one.reason is None else f"{one.state}: {one.reason}",
            f"{one.step}/{one.steps}",
            _rewards(one.reward, one.rewards),
            _rewards(one.validation, one.validations),
            "" if one.seconds_left is None else duration(one.seconds_left),
            str(len(one.warnings) or ""),
            "" if one.changed_at is None else f"{duration(now - one.changed_at)} ago",
        )
        for one in found
    ]
    return fitted_table(names, rows, width, names[2:], ("run", "state", "validation", "reward"), ("changed", "left"))


def _one(run: Run, width: int, now: float) -> list[RenderableType]:
    try:
        with run.open() as connection:
            return [
                Text(one_line(run.name), style="bold"),
                *curve_lines(readable_metrics(connection).rows, width),
                Text(),
                _ended(connection, width, now),
                Text(),
                calls_table(slow_calls(connection), width, now),
            ]
    except PalestraError as error:
        return [Text(one_line(str(error)))]
    except DAMAGED as error:
        return [Text(one_line(f"a record can't be read: {type(error).__name__}: {error}"))]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return numbers, oldest first, as bars; means of consecutive numbers if there are more than `width`."""
    if not values or width < 1:
        return ""
    count = min(len(values), width)
    edges = [place * len(values) // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in means)


def curve_lines(rows: Sequence[Mapping[str, float]], width: int) -> list[RenderableType]:
    """Return a line for each metric curve of a run: its name, bars, the newest value and the range."""
    lines: list[RenderableType] = []
    found = [
        (f"{whole.removesuffix(name).removesuffix('/')} {label}".lstrip(), whole)
        for name, label in CURVES
        for whole in names_of_policies(rows, name)
    ]
    room = max((LABEL, *(len(label) + 1 for label, _ in found)))
    for label, name in found:
        values = [row[name] for row in rows if name in row]
        bars = sparkline(values, min(max(width - room - 30, 8), BROADEST))
        text = f"{one_line(label):<{room}}{bars} {values[-1]:.3g} ({min(values):.3g} to {max(values):.3g})"
        lines.append(Text(text))
    return lines


def _ended(connection: Connection, width: int, now: float) -> Table:
    wanted = select(episodes).where(episodes.c.ended_at.is_not(None)).order_by(episodes.c.ended_at.desc()).limit(NEWEST)
    rows = connection.execute(wanted).all()
    found = []
    for row, one in zip(rows, readable_summaries(connection, rows), strict=True):
        ended = f"{duration(now - row.ended_at)} ago" if isinstance(row.ended_at, float) else ""
        if isinstance(one, EpisodeSummary):
            counts = (str(one.calls), str(one.completion_tokens))
            found.append((one.episode_id, one.task_id, one.state, rewards_of(one), *counts, ended))
        else:
            found.append((one.episode_id, "", "damaged", "", "", "", ended))
    return episodes_table("episodes that ended", found, width, "ended")


def episodes_table(title: str, rows: Sequence[Sequence[str]], width: int, *more: str) -> Table:
    """Return a table of episodes.

    Args:
        rows: id, task, state, reward, calls and tokens of each, then the columns of `more`.
    """
    names = (title, "task", "state", "reward", "calls", "tokens", *more)
    return fitted_table(
        names, rows, width, ("reward", "calls", "tokens"), ("task", "reward", title), ("ended", "calls")
    )


def calls_table(calls: Sequence[SlowCall], width: int, now: float) -> Table:
    """Return a table of slow calls.

    Args:
        now: Unix seconds.
    """
    rows = [
        (one.episode_id, str(one.call), one.agent, f"{one.seconds:.2f}", f"{duration(now - one.ended)} ago")
        for one in calls
    ]
    names = ("slowest calls", "call", "agent", "seconds", "ended")
    return fitted_table(names, rows, width, ("call", "seconds"), ("agent", "slowest calls"), ("ended",))


def number(value: float | None) -> str:
    """Return a number with three digits; empty for None."""
    return "" if value is None else f"{value:.3g}"


def _rewards(sole: float | None, by_policy: Mapping[str, float]) -> str:
    """Return a mean reward as text; each policy's if several are trained."""
    if not by_policy:
        return number(sole)
    return one_line(" ".join(f"{policy} {value:.3g}" for policy, value in by_policy.items()))
