"""Numbers of a run's steps that the metrics do not have, read from its store and its folder."""

from __future__ import annotations

import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, select

from palestra.doctor.store_rules import (
    AGENT_REWARD,
    CLAIMS,
    CONSTANT_SUM,
    FAILURES,
    FREE,
    HIGHEST,
    LOWEST,
    NEEDED,
    REASON,
    REWARD_SPREAD,
    TOGETHER,
    TWO_AGENTS,
)
from palestra.store.run_store import UNREADABLE
from palestra.store.tables import episodes, groups

# Beginnings of reasons with which no attempt failed: its episode was left out on purpose, or its job was stopped.
ON_PURPOSE = ("not_scored", "cancelled")
LONGEST_REASON = 80  # characters: of the same failure, what differs from one to the next stands behind


def store_facts(connection: Connection) -> dict[int, dict[str, float]]:
    """Return numbers of the training episodes of each step, by its number.

    Args:
        connection: from `browse`.
    """
    columns = (episodes.c.state, episodes.c.attempts, episodes.c.rewards, episodes.c.reason, groups.c.step)
    of_group = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
    wanted = select(*columns).join(groups, of_group).where(episodes.c.kind == "train")
    by_step: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(wanted):
        by_step[row.step].append(row)
    return {step: _attempts(rows) | _opponents(rows) for step, rows in by_step.items()}


def _attempts(rows: Iterable[Any]) -> dict[str, float]:
    """Return how many attempts to play the episodes there were, how many failed, and why."""
    found: dict[str, float] = defaultdict(float, {CLAIMS: 0.0, FAILURES: 0.0})
    for row in rows:
        if not isinstance(row.attempts, int):
            continue  # a damaged row
        reason = row.reason if isinstance(row.reason, str) else ""
        succeeded = row.state in ("completed", "claimed") or reason.startswith(ON_PURPOSE)
        failures = max(row.attempts - succeeded, 0)
        found[CLAIMS] += row.attempts
        found[FAILURES] += failures
        if failures and reason:
            found[REASON + " ".join(reason.split())[:LONGEST_REASON]] += failures
    return found


def _opponents(rows: Iterable[Any]) -> dict[str, float]:
    """Return the rewards of the two agents of the episodes; nothing where other agents play."""
    rewards = [found for row in rows if row.rewards is not None and (found := _rewards(row.rewards)) is not None]
    names = {name for found in rewards for name in found}
    if len(names) != 2 or any(len(found) != 2 for found in rewards):
        return {}
    sums = sorted(math.fsum(found.values()) for found in rewards)
    middle = sums[len(sums) // 2]
    known = [value for found in rewards for value in found.values()]
    one, other = ([found[name] for found in rewards] for name in sorted(names))
    together = _correlation(one, other)
    return {
        TWO_AGENTS: float(len(rewards)),
        CONSTANT_SUM: sum(math.isclose(value, middle, abs_tol=1e-6) for value in sums) / len(sums),
        REWARD_SPREAD: max(known) - min(known),
        HIGHEST: max(known),
        LOWEST: min(known),
        **({} if together is None else {TOGETHER: together}),
    } | {AGENT_REWARD + name: math.fsum(found[name] for found in rewards) / len(rewards) for name in names}


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the correlation of two agents' rewards, from -1 to 1; None: one of them is always the same."""
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:
        return None


def _rewards(text: str) -> dict[str, float] | None:
    """Return rewards by agent; None: the record is damaged."""
    try:
        return {str(name): float(value) for name, value in orjson.loads(text).items()}
    except (*UNREADABLE, TypeError, AttributeError):
        return None


def disk_facts(folder: Path, step: int, steps: int) -> Mapping[str, float]:
    """Return how many bytes of a run's disk are free, and how many the rest of the run needs; nothing where it is over.

    Args:
        folder: of the run.
        step: number of the newest step.
        steps: of the job.
    """
    if not 0 < step < steps:
        return {}
    store = sum(size_of(folder / name) for name in ("run.db", "run.db-wal"))
    checkpoints = folder / "checkpoints"
    sizes = [sum(map(size_of, one.rglob("*"))) for one in checkpoints.iterdir()] if checkpoints.is_dir() else []
    needed = store / step * (steps - step) + max(sizes, default=0)
    return {FREE: float(shutil.disk_usage(folder).free), NEEDED: needed}


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0: it is not there any more, or it is a folder."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
