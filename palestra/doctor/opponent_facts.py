"""Rewards of the two agents in a step's episodes, from the store, for the rules about opponents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence

import orjson
from sqlalchemy import Connection, select

from palestra.doctor.opponent_rules import (
    AGENT_REWARD,
    CONSTANT_SUM,
    HIGHEST,
    LOWEST,
    REWARD_SPREAD,
    TOGETHER,
    TWO_AGENTS,
)
from palestra.store.run_log import read_manifest
from palestra.store.run_store import UNREADABLE
from palestra.store.tables import episodes, groups


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
