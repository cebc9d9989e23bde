"""Numbers of a run's steps that the metrics do not have, read from its store and its folder."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import orjson
from sqlalchemy import ColumnElement, Connection, and_, func, or_, select, true

from palestra.store.run_log import read_manifest
from palestra.store.run_store import UNREADABLE
from palestra.store.tables import chats, episodes, groups
from palestra.types.records import ON_PURPOSE

# Names of the numbers that `opponent_facts` adds to a row.
AGENT_REWARD = "store/reward/"  # and the agent: its mean reward
CONSTANT_SUM, TWO_AGENTS = "store/constant_sum_share", "store/episodes_of_two"
REWARD_SPREAD = "store/reward_spread"
HIGHEST, LOWEST = "store/reward_highest", "store/reward_lowest"
TOGETHER = "store/reward_correlation"  # of the two agents of an episode; absent where one always earns the same

# Names of the numbers that `store_facts` adds to a row.
CLAIMS, FAILURES = "store/claims", "store/failures"
REASON = "store/reason/"  # and the reason: how many attempts of the step ended with it
FREE, NEEDED = "disk/free_bytes", "disk/needed_bytes"

# Episodes that were completed, and attempts that failed after the model had been called; and the calls of both.
COMPLETED, COMPLETED_CALLS = "store/completed", "store/completed_calls"
LATE, LATE_CALLS = "store/late_failures", "store/late_failure_calls"
LATE_SHARE = 0.1  # of attempts: the calls of completed episodes are counted where so many failed after a call


def opponent_facts(connection: Connection, steps: Collection[int]) -> dict[int, dict[str, float]]:
    """Return numbers about the two agents in the episodes that steps have trained, by step.

    Episodes outside a step's batch, such as those of dropped groups, are left out: whether they are over when the step
    is trained depends on time.
    """
    by_step: dict[int, list[str | None]] = {step: [] for step in steps}
    step_of = steps_of_groups(connection, steps)
    mine = of_groups(step_of)
    # Rewards of several agents have a comma; a name with one costs no more than a look at its step.
    several = select(episodes.c.group_index).where(mine, func.instr(episodes.c.rewards, ",") > 0).distinct()
    played = {step_of[group] for group in connection.execute(several).scalars() if group in step_of}
    trained = {step: _batch(connection, step) for step in played}
    columns = (episodes.c.episode_id, episodes.c.rewards, episodes.c.group_index)
    wanted = select(*columns).where(mine).order_by(episodes.c.group_index, episodes.c.sample_index)
    for row in connection.execute(wanted) if played else ():
        step = step_of.get(row.group_index, 0)
        if row.episode_id in trained.get(step, ()):
            by_step[step].append(row.rewards)
    return {step: rewards_of_two(recorded) for step, recorded in by_step.items()}


def steps_of_groups(connection: Connection, steps: Collection[int]) -> dict[int, int]:
    """Return the step of each training group of some steps, by index of the group."""
    of_steps = select(groups.c.group_index, groups.c.step).where(groups.c.kind == "train", groups.c.step.in_(steps))
    return {group: step for group, step in connection.execute(of_steps)}


def of_groups(step_of: Mapping[int, int]) -> ColumnElement[bool]:
    """Return the condition of the training episodes between the first of some groups and the last.

    A join with `groups` would take as long as the run: SQLite, which has no statistics of it, begins with all episodes.
    """
    first, last = min(step_of, default=0), max(step_of, default=-1)
    return and_(episodes.c.kind == "train", episodes.c.group_index.between(first, last))


def _batch(connection: Connection, step: int) -> frozenset[str]:
    """Return the ids of the episodes that a step has trained; empty if the record of its batch is damaged."""
    try:
        manifest = read_manifest(connection, step)
    except (*UNREADABLE, TypeError, AttributeError):
        return frozenset()
    return frozenset(() if manifest is None else manifest.episode_ids)


def rewards_of_two(recorded: Iterable[str | None]) -> dict[str, float]:
    """Return numbers about the rewards of exactly two agents; empty for other agents. `recorded`: rewards of each
    episode by agent, as JSON; None: the episode has none.
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
PIECE = 100  # steps whose episodes are read together
LONGEST_REASON = 80  # characters: of the same failure, what differs from one to the next stands behind


def store_facts(connection: Connection, after: int = 0, until: int = 2**62) -> dict[int, dict[str, float]]:
    """Return numbers of the training episodes of the first `PIECE` steps after a step, by number of the step.

    Attempts count those of all groups of the step; rewards are those of its batch, as a running job looks at them.
    """
    number = groups.c.step
    of_train = select(number).where(groups.c.kind == "train", number > after, number <= until).distinct()
    steps = list(connection.execute(of_train.order_by(number).limit(PIECE)).scalars())
    step_of = steps_of_groups(connection, steps)
    attempts, rewards = _attempts(connection, step_of), opponent_facts(connection, steps)
    calls = _calls(connection, step_of, attempts)
    return {step: attempts[step] | calls[step] | rewards[step] for step in steps}


def _calls(
    connection: Connection, step_of: Mapping[int, int], attempts: Mapping[int, Mapping[str, float]]
) -> dict[int, dict[str, float]]:
    """Return by step the attempts that failed after a call, and, where many did, how far completed episodes got."""
    found = _calls_where(connection, step_of, or_(episodes.c.fence > 1, episodes.c.state == "discarded"))
    for step, calls in found.items():
        if 0 < calls[LATE] >= LATE_SHARE * attempts[step][CLAIMS]:
            own = {group: of for group, of in step_of.items() if of == step}
            calls |= _calls_where(connection, own, true())[step]
        else:
            calls |= {COMPLETED: 0.0, COMPLETED_CALLS: 0.0}
    return found


def _calls_where(
    connection: Connection, step_of: Mapping[int, int], condition: ColumnElement[bool]
) -> dict[int, dict[str, float]]:
    """Return by step how many attempts with calls the settled episodes for which a condition holds have had."""
    columns = (episodes.c.group_index, episodes.c.state, episodes.c.reason, episodes.c.fence == chats.c.fence)
    wanted = (
        select(*columns, func.count())
        .where(of_groups(step_of), condition, chats.c.episode_id == episodes.c.episode_id)
        .where(episodes.c.state.in_(("completed", "discarded")))
        .group_by(chats.c.episode_id, chats.c.fence)
    )
    found = {step: dict.fromkeys(_OF_CALLS, 0.0) for step in step_of.values()}
    for group, state, reason, last, calls in connection.execute(wanted):
        if group not in step_of or (last and isinstance(reason, str) and reason.startswith(ON_PURPOSE)):
            continue
        over, sampled = _OF_CALLS[:2] if last and state == "completed" else _OF_CALLS[2:]
        found[step_of[group]][over] += 1
        found[step_of[group]][sampled] += calls
    return found


def _attempts(connection: Connection, step_of: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return how many attempts to play the episodes of each step there were, how many failed, and why."""
    found = {step: {CLAIMS: 0.0, FAILURES: 0.0} for step in step_of.values()}
    columns = (episodes.c.group_index, episodes.c.state, episodes.c.attempts, episodes.c.reason)
    counted = select(*columns, func.count()).where(of_groups(step_of)).group_by(*columns)
    for group, state, attempts, why, count in connection.execute(counted):
        if group not in step_of or not isinstance(attempts, int):
            continue  # a damaged row
        reason, of_step = why if isinstance(why, str) else "", found[step_of[group]]
        succeeded = state in ("completed", "claimed", "unjudged") or reason.startswith(ON_PURPOSE)
        failures = max(attempts - succeeded, 0) * count
        of_step[CLAIMS] += attempts * count
        of_step[FAILURES] += failures
        if failures and reason:
            name = REASON + " ".join(reason.split())[:LONGEST_REASON]
            of_step[name] = of_step.get(name, 0.0) + failures
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
