"""What jobs will take, by former runs, when they are submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.config import parse_config
from palestra.config.budget import HOUR_MS, UNITS
from palestra.dashboard.answers import Cost
from palestra.dashboard.costs import read_costs
from palestra.errors import PalestraError

MOST_RUNS = 5  # former runs that are read
UNKNOWN = "unknown until step 2"
Bounds = tuple[float, float, float]  # the least, the mean and the most
_MEANS_NOTHING = ("name", "seed", "run_dir", "budget")  # to what a job takes


def same_work(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two configurations describe the same work."""

    def meant(one: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in one.items() if name not in _MEANS_NOTHING}

    return meant(config) == meant(other)


def by_former_runs(config: Mapping[str, Any], runs: Sequence[Path]) -> str:
    """Return what finished runs of the same work have taken, with this configuration's prices. Blocks for the disk."""
    parsed, found = parse_config(dict(config)), list[Cost]()
    for run in runs[:MOST_RUNS]:
        try:
            found.append(read_costs(run, parsed).total)
        except PalestraError:  # its folder was removed
            continue
    if not found:
        return UNKNOWN
    tokens = _range([float(one.prompt_tokens + one.reply_tokens) for one in found])
    hours = _range([one.ms / HOUR_MS for one in found])
    money = None if parsed.prices is None else _range([one.money / UNITS for one in found])
    former = "a former run" if len(found) == 1 else f"{len(found)} former runs"
    return f"{amounts_in_words(tokens, hours, money)}, by {former} of the same configuration"


def amounts_in_words(tokens: Bounds, hours: Bounds, money: Bounds | None) -> str:
    """Describe what a job takes, each amount with its bounds."""
    amounts = [("tokens", ",.0f", tokens), ("hours", ".3g", hours)]
    amounts += [] if money is None else [("money", ".4g", money)]
    return ", ".join(f"{mean:{how}} ({low:{how}} to {high:{how}}) {name}" for name, how, (low, mean, high) in amounts)


def _range(values: Sequence[float]) -> Bounds:
    """Return the mean with the least and the most; those of one value are a tenth away from it."""
    mean, spread = sum(values) / len(values), 0.1 if len(values) == 1 else 0.0
    return min(values) * (1 - spread), mean, max(values) * (1 + spread)
