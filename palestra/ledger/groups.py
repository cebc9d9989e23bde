"""The groups of a run, as operations on a connection: registered whole, and settled when their episodes are."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.ledger.codec import episode_of, to_json
from palestra.ledger.episodes import episode_name
from palestra.ledger.tables import episodes, groups
from palestra.schemas.protocols import GroupRecord
from palestra.schemas.records import Episode, EpisodeKind, Task
from palestra.schemas.states import EpisodeState, GroupState, check_transition

OPEN_STATES = (EpisodeState.REGISTERED, EpisodeState.CLAIMED)
SETTLED_STATES = (EpisodeState.COMPLETED, EpisodeState.DISCARDED)
_OPEN_OF_STEP = (
    select(episodes.c.episode_id)
    .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
    .where(
        episodes.c.state == bindparam("state"),
        episodes.c.kind == bindparam("kind"),
        groups.c.step == bindparam("step"),
    )
    .limit(1)
)
_SETTLED_OF_STEP = (
    select(
        func.count().filter(episodes.c.state.in_([state.value for state in SETTLED_STATES])),
        func.count(),
    )
    .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
    .where(
        episodes.c.kind == bindparam("kind"),
        groups.c.step == bindparam("step"),
        groups.c.state != GroupState.DROPPED.value,
    )
)
_COUNT = select(func.count()).where(episodes.c.state == bindparam("state"), episodes.c.kind == bindparam("kind"))


def register_group(
    connection: Connection, kind: EpisodeKind, group_index: int, step: int, task: Task, size: int
) -> int:
    """Returns how many episodes were added: `size`, or 0 when the group is known."""
    if connection.execute(
        select(groups.c.size).where(groups.c.kind == kind, groups.c.group_index == group_index)
    ).first():
        return 0
    connection.execute(
        groups.insert(),
        {
            "kind": kind,
            "group_index": group_index,
            "step": step,
            "task_id": task.task_id,
            "size": size,
            "state": GroupState.OPEN.value,
        },
    )
    _add_episodes(connection, kind, group_index, task.task_id, to_json(task.data), range(size))
    return size


def register_again(connection: Connection, kind: EpisodeKind, group_index: int, count: int) -> None:
    """Add episodes to a group, in the place of some that can't be used."""
    last = connection.execute(
        select(episodes)
        .where(episodes.c.kind == kind, episodes.c.group_index == group_index)
        .order_by(episodes.c.sample_index.desc())
        .limit(1)
    ).one()
    following = range(last.sample_index + 1, last.sample_index + 1 + count)
    _add_episodes(connection, kind, group_index, last.task_id, last.task_data, following)


def of_step(connection: Connection, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[Episode]]]:
    """A step's groups in canonical order, each with its episodes."""
    records = [
        GroupRecord(
            kind=row.kind,
            group_index=row.group_index,
            step=row.step,
            task_id=row.task_id,
            size=row.size,
            state=GroupState(row.state),
        )
        for row in connection.execute(
            select(groups).where(groups.c.kind == kind, groups.c.step == step).order_by(groups.c.group_index)
        )
    ]
    if not records:
        return []
    members: dict[int, list[Episode]] = {record.group_index: [] for record in records}
    for row in connection.execute(
        select(episodes)
        .where(
            episodes.c.kind == kind,
            episodes.c.group_index.between(records[0].group_index, records[-1].group_index),
        )
        .order_by(episodes.c.group_index, episodes.c.sample_index)
    ):
        if row.group_index in members:
            members[row.group_index].append(episode_of(row))
    return [(record, members[record.group_index]) for record in records]


def progress(connection: Connection, kind: EpisodeKind, step: int) -> tuple[bool, int]:
    """(whether an episode of this step may still be completed, how many of its kind were discarded)."""
    is_open = any(
        connection.execute(_OPEN_OF_STEP, {"kind": kind, "step": step, "state": state.value}).first()
        for state in OPEN_STATES
    )
    return is_open, discarded(connection, kind)


def settled_of_step(connection: Connection, kind: EpisodeKind, step: int) -> tuple[int, int]:
    """(settled episodes, all episodes) of the groups of a step that were not dropped."""
    done, due = connection.execute(_SETTLED_OF_STEP, {"kind": kind, "step": step}).one()
    return int(done), int(due)


def discarded(connection: Connection, kind: EpisodeKind) -> int:
    """How many episodes of this kind were discarded."""
    return int(connection.execute(_COUNT, {"kind": kind, "state": EpisodeState.DISCARDED.value}).scalar_one())


def discard_reasons(connection: Connection, kind: EpisodeKind, step: int) -> list[str]:
    """Return why each discarded episode of a step was discarded, dropped groups included."""
    wanted = (
        select(episodes.c.reason)
        .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
        .where(episodes.c.kind == kind, groups.c.step == step, episodes.c.state == EpisodeState.DISCARDED.value)
        .order_by(episodes.c.group_index, episodes.c.sample_index)
    )
    return [reason or "" for reason in connection.execute(wanted).scalars()]


def open_groups(connection: Connection, kind: EpisodeKind) -> int:
    """Groups of which an episode may still be completed."""
    states = [state.value for state in OPEN_STATES]
    wanted = select(func.count(sa.distinct(episodes.c.group_index))).where(
        episodes.c.state.in_(states), episodes.c.kind == kind
    )
    return int(connection.execute(wanted).scalar_one())


def settle_group(connection: Connection, kind: EpisodeKind, group_index: int, following: GroupState) -> None:
    """OPEN → READY or DROPPED; the same again is a no-op."""
    where = (groups.c.kind == kind, groups.c.group_index == group_index)
    current = GroupState(connection.execute(select(groups.c.state).where(*where)).scalar_one())
    if current is following:
        return
    check_transition(f"group {kind} {group_index}", current, following)
    connection.execute(sa.update(groups).where(*where).values(state=following.value))


def next_group_index(connection: Connection, kind: EpisodeKind) -> int:
    """One more than the largest in use."""
    return int(
        connection.execute(
            select(func.coalesce(func.max(groups.c.group_index), -1) + 1).where(groups.c.kind == kind)
        ).scalar_one()
    )


def _add_episodes(
    connection: Connection, kind: EpisodeKind, group_index: int, task_id: str, task_data: str, samples: range
) -> None:
    connection.execute(
        episodes.insert(),
        [
            {
                "episode_id": episode_name(kind, group_index, sample),
                "kind": kind,
                "group_index": group_index,
                "sample_index": sample,
                "task_id": task_id,
                "task_data": task_data,
                "state": EpisodeState.REGISTERED.value,
            }
            for sample in samples
        ],
    )
