"""Numbers of a run's steps that the metrics do not have, read from its store and its folder."""

from __future__ import annotations

import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.doctor.opponent_rules import (
    AGENT_REWARD,
    CONSTANT_SUM,
    HIGHEST,
    LOWEST,
    REWARD_SPREAD,
    TOGETHER,
    TWO_AGENTS,
)
from palestra.doctor.store_rules import (
    CLAIMS,
    COMPLETED,
    COMPLETED_CALLS,
    FAILURES,
    FREE,
    LATE,
    LATE_CALLS,
    NEEDED,
    REASON,
)
from palestra.store.run_log import read_manifest
from palestra.store.run_store import UNREADABLE
from palestra.store.tables import chats, episodes, groups
from palestra.types.records import ON_PURPOSE


def opponent_facts(connection: Connection, steps: Collection[int]) -> dict[int, dict[str, float]]:
    """Return numbers about the two agents in the episodes that steps have trained, by step.

    Episodes outside a step's batch, such as those of dropped groups, are left out: whether they are over when the step
    is trained depends on time.
    """
    of_group = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
    columns = (episodes.c.episode_id, episodes.c.rewards, groups.c.step)
    wanted = select(*columns).join(groups, of_group).where(episodes.c.kind == "train", groups.c.step.in_(steps))
    order = wanted.order_by(episodes.c.group_index, episodes.c.sample_index)
    trained = {step: _batch(connection, step) for step in steps}
    by_step: dict[int, list[str | None]] = {step: [] for step in steps}
    for row in connection.execute(order):
        if row.episode_id in trained[row.step]:
            by_step[row.step].append(row.rewards)
    return {step: rewards_of_two(recorded) for step, recorded in by_step.items()}


def _batch(connection: Connection, step: int) -> frozenset[str]:
    """Return the ids of the episodes that a step has trained; empty if the record of its batch is damaged."""
    try:
        manifest = read_manifest(connection, step)
    except (*UNREADABLE, TypeError, AttributeError):
        return frozenset()
    return frozenset(() if manifest is None else manifest.episode_ids)


def rewards_of_two(recorded: Iterable[str | None]) -> dict[str, float]:
    """Return numbers about the rewards of exactly two agents; empty for other agents.

    Args:
        recorded: rewards of each episode by agent, as JSON; None: the episode has none.
    """
    rewards = [found for text in recorded if text is not None and (found := _rewards(text)) is not None]
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
    """Return the correlation of two agents' rewards, from -1 to 1; None: one of them is constant."""
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


_OF_CALLS = (COMPLETED, COMPLETED_CALLS, LATE, LATE_CALLS)
LONGEST_REASON = 80  # characters: of the same failure, what differs from one to the next stands behind


def store_facts(connection: Connection, after: int = 0) -> dict[int, dict[str, float]]:
    """Return numbers about the training episodes of each step, by step.

    Attempts include all groups of the step; rewards are those of its batch, as in a running job.
    """
    columns = (episodes.c.state, episodes.c.attempts, episodes.c.reason, groups.c.step)
    of_group = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
    wanted = select(*columns).join(groups, of_group).where(episodes.c.kind == "train", groups.c.step > after)
    by_step: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(wanted):
        if isinstance(row.step, int):  # otherwise its group's record is damaged
            by_step[row.step].append(row)
    rewards, calls = opponent_facts(connection, by_step.keys()), _calls(connection, after)
    return {step: _attempts(rows) | calls[step] | rewards[step] for step, rows in by_step.items()}


def _calls(connection: Connection, after: int) -> dict[int, dict[str, float]]:
    """Return by step how far episodes got that were completed, and attempts that failed after a call of the model."""
    of_group = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
    columns = (groups.c.step, episodes.c.state, episodes.c.reason, episodes.c.fence == chats.c.fence, func.count())
    wanted = (
        select(*columns)
        .select_from(episodes.join(groups, of_group).join(chats, chats.c.episode_id == episodes.c.episode_id))
        .where(episodes.c.kind == "train", groups.c.step > after, episodes.c.state.in_(("completed", "discarded")))
        .group_by(chats.c.episode_id, chats.c.fence)
    )
    found: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_OF_CALLS, 0.0))
    for step, state, reason, last, calls in connection.execute(wanted):
        if last and isinstance(reason, str) and reason.startswith(ON_PURPOSE):
            continue
        over, sampled = _OF_CALLS[:2] if last and state == "completed" else _OF_CALLS[2:]
        found[step][over] += 1
        found[step][sampled] += calls
    return found


def _attempts(rows: Iterable[Any]) -> dict[str, float]:
    """Return how many attempts to play the episodes there were, how many failed, and why."""
    found: dict[str, float] = defaultdict(float, {CLAIMS: 0.0, FAILURES: 0.0})
    for row in rows:
        if not isinstance(row.attempts, int):
            continue  # a damaged row
        reason = row.reason if isinstance(row.reason, str) else ""
        succeeded = row.state in ("completed", "claimed", "unjudged") or reason.startswith(ON_PURPOSE)
        failures = max(row.attempts - succeeded, 0)
        found[CLAIMS] += row.attempts
        found[FAILURES] += failures
        if failures and reason:
            found[REASON + " ".join(reason.split())[:LONGEST_REASON]] += failures
    return found


def disk_facts(folder: Path, step: int, steps: int) -> Mapping[str, float]:
    """Return the free bytes of a run's disk, and how many the rest of the run needs; empty if it is over."""
    if not 0 < step < steps:
        return {}
    store = sum(file_size(folder / name) for name in ("run.db", "run.db-wal"))
    checkpoints = folder / "checkpoints"
    sizes = [sum(map(file_size, one.rglob("*"))) for one in checkpoints.iterdir()] if checkpoints.is_dir() else []
    needed = store / step * (steps - step) + max(sizes, default=0)
    return {FREE: float(shutil.disk_usage(folder).free), NEEDED: needed}


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0: it is missing, or a folder."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
