"""What jobs of a service will take: by former runs at their submission, and by their first two steps when they run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from palestra.config import JobConfig, parse_config
from palestra.config.budget import HOUR_MS, UNITS
from palestra.dashboard.costs import Cost, read_costs
from palestra.errors import PalestraError
from palestra.runtime.local_job import LocalJob
from palestra.store.browsing import browse
from palestra.store.run_log import readable_metrics
from palestra.store.spending import usage_of_calls
from palestra.store.tables import episodes, groups, tasks
from palestra.threads import in_thread
from palestra_inspect.estimate import Interval, JobEstimate, estimate_of
from palestra_inspect.trial import STEPS, Trial

log = logging.getLogger("palestra")
LOOK_SECONDS = 0.2  # between two looks at the steps of a job
MOST_RUNS = 5  # former runs that are read
UNKNOWN = f"unknown until step {STEPS}"
_MEANS_NOTHING = ("name", "seed", "run_dir", "budget")  # to what a job takes


async def say_estimate(job: LocalJob) -> None:
    """Add an event with the estimate of a job when its second step is over, unless an earlier process has."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if job.progress.step >= STEPS or job.progress.over:
            break
    run = Path(job.progress.run_dir)
    try:
        found = await in_thread(lambda: _estimate_of_run(run, job.opened.config))
        if found is not None and not job.progress.over:
            text = f"by its first {STEPS} steps, the job takes {in_words(found.tokens, found.hours, found.money)}"
            await job.opened.store.log.add_event("estimate", {"step": STEPS, "text": text})
    except PalestraError as error:
        log.warning("the estimate of the job could not be made: %s", error)


def _estimate_of_run(run: Path, config: JobConfig) -> JobEstimate | None:
    """Return the estimate by the first steps of a run; None: they are not over, or an event has it. Blocks."""
    with browse(run / "run.db") as connection:
        rows = [row for row in readable_metrics(connection, after=0).rows if row["step"] <= STEPS]
        known = connection.exec_driver_sql("SELECT 1 FROM events WHERE kind = 'estimate'").first()
        if len(rows) < STEPS or known is not None:
            return None
        of_steps = select(episodes.c.episode_id).join(
            groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
        )
        played = set(connection.execute(of_steps.where(groups.c.kind == "train", groups.c.step <= STEPS)).scalars())
        used = [one for one in usage_of_calls(connection, config) if one.episode_id in played]
        held_out = select(func.count()).select_from(tasks).where(tasks.c.split.startswith("validation"))
        return estimate_of(
            config,
            Trial(
                rows=rows,
                used=used,
                episodes=len(played),
                seconds=rows[-1].get("wall_seconds", 0.0),
                held_out=connection.execute(held_out).scalar_one(),
            ),
        )


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
    return f"{in_words(tokens, hours, money)}, by {former} of the same configuration"


def in_words(tokens: Interval, hours: Interval, money: Interval | None) -> str:
    """Describe what a job takes, each amount with its bounds."""
    parts = [
        f"{tokens.shown(lambda number: f'{number:,.0f}')} tokens",
        f"{hours.shown(lambda number: f'{number:.3g}')} hours",
    ]
    return ", ".join(parts + ([] if money is None else [f"{money.shown(lambda number: f'{number:.4g}')} money"]))


def _range(values: Sequence[float]) -> Interval:
    """Return the mean with the least and the most; those of one value are a tenth away from it."""
    mean, spread = sum(values) / len(values), 0.1 if len(values) == 1 else 0.0
    return Interval(min(values) * (1 - spread), mean, max(values) * (1 + spread))
