"""The groups of a job: registered whole, and settled when all of their episodes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.database import WAKE_SECONDS, Database, Notifier, shielded, to_json
from palestra.database.sqlite import Prepared, pieces
from palestra.store.codec import chat_row, end_columns, episode_of
from palestra.store.counting import OPEN_STATES, SETTLED_STATES, OpenGroups
from palestra.store.lifecycle import episode_name
from palestra.store.run_log import insert_event
from palestra.store.tables import OF_GROUP, OF_LAST_LEASE, chats, episodes, groups
from palestra.types.clock import Clock
from palestra.types.progress import GroupRecord
from palestra.types.records import EpisodeKind, EpisodeRecord, RecordedEpisode, Task
from palestra.types.states import REPLACED, EpisodeState, GroupState, check_transition

_IS_OPEN = sa.exists().where(OF_GROUP, episodes.c.state.in_([state.value for state in OPEN_STATES]))
_OF_STEP = (
    select(groups.c.group_index, groups.c.state, _IS_OPEN)
    .where(groups.c.kind == bindparam("kind"), groups.c.step == bindparam("step"))
    .order_by(groups.c.group_index)
)
_OPEN = (
    select(groups.c.kind, groups.c.step, groups.c.group_index, func.count())
    # The sum keeps SQLite from looking up the episodes of every group.
    .join(episodes, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index + 0))
    .where(episodes.c.state.in_([state.value for state in OPEN_STATES]))
    .group_by(groups.c.kind, groups.c.group_index)
)
_INSERT_EPISODE = Prepared(
    episodes.insert().values(
        {
            name: bindparam(name)
            for name in ("episode_id", "kind", "group_index", "sample_index", "task_id", "task_data", "state")
        }
        | {"fence": 0, "attempts": 0, "lease_seconds": 0.0, "metadata": "{}"}
    )
)
# Of a step. SQLite has no statistics of a run; it would begin a join with all episodes.
_INDICES = select(groups.c.group_index).where(groups.c.kind == bindparam("kind"), groups.c.step == bindparam("step"))
_EPISODES_OF_STEP = select(func.count()).where(
    episodes.c.kind == bindparam("kind"),
    episodes.c.group_index.in_(_INDICES.where(groups.c.state.not_in([state.value for state in REPLACED]))),
)
_SETTLED = episodes.c.state.in_([state.value for state in SETTLED_STATES])
# Two counts, because each has an index that holds all it reads.
_SETTLED_OF_STEP = select(_EPISODES_OF_STEP.where(_SETTLED).scalar_subquery(), _EPISODES_OF_STEP.scalar_subquery())
_REPLIES_OF_STEP = (
    select(func.count(), func.count().filter(chats.c.finish_reason == "length"))
    .join(episodes, OF_LAST_LEASE)
    .where(episodes.c.kind == bindparam("kind"), episodes.c.group_index.in_(_INDICES))
)
MOST_ADDED = 512  # episodes that one transaction registers, while all other changes wait


class GroupNow(NamedTuple):
    """A group of a step; `is_open` says whether one of its episodes may still be completed."""

    group_index: int
    state: GroupState
    is_open: bool


class Played(NamedTuple):
    """The ids of a group's completed episodes, by sample index, and the number of discarded ones."""

    completed: list[str]
    discarded: int


class Groups:
    """Registers groups of episodes, and waits for them; the learner decides about their states.

    Methods return when their changes are on disk.

    Attributes:
        available: notified when episodes can be claimed.
    """

    def __init__(self, db: Database, clock: Clock, available: Notifier, open_groups: OpenGroups) -> None:
        self._db, self._clock, self.available, self.open = db, clock, available, open_groups

    async def register(self, kind: EpisodeKind, group_index: int, step: int, task: Task, size: int) -> None:
        """Register a group whose episodes all play one task; see `register_many`."""
        await self.register_many(kind, step, {group_index: (task,)}, size)

    async def register_many(self, kind: EpisodeKind, step: int, tasks: Mapping[int, Sequence[Task]], size: int) -> None:
        """Register groups and their episodes, in pieces; existing groups are not changed.

        Args:
            step: train: the step that trains on them; validation: the number of steps after which they are scored.
            tasks: by group index in canonical order; a group's episodes play its tasks in turn, and the first one names
                the group in lists.
        """
        for piece in pieces(list(tasks.items()), max(1, MOST_ADDED // size)):
            await self._register(kind, step, dict(piece), size)

    @shielded
    async def _register(self, kind: EpisodeKind, step: int, tasks: Mapping[int, Sequence[Task]], size: int) -> None:
        def register(connection: Connection) -> list[int]:
            """Return which groups were added."""
            where = (groups.c.kind == kind, groups.c.group_index.in_(tasks))
            known = set(connection.execute(select(groups.c.group_index).where(*where)).scalars())
            new = {index: of_group for index, of_group in tasks.items() if index not in known}
            if new:
                values = {"kind": kind, "step": step, "size": size, "state": GroupState.OPEN.value}
                named = [values | {"group_index": i, "task_id": of_group[0].task_id} for i, of_group in new.items()]
                connection.execute(groups.insert(), named)
            rows = []
            for index, of_group in new.items():
                data = [(one.task_id, to_json(one.data)) for one in of_group]
                rows += [_new_episode(kind, index, sample, *data[sample % len(data)]) for sample in range(size)]
            _INSERT_EPISODE.change_many(connection, rows)
            return list(new)

        added = await self._db.write(register)
        for index in added:
            self.open.add(kind, step, index, size)
        self.available.notify(len(added) * size)

    @shielded
    async def register_again(self, kind: EpisodeKind, step: int, names: Mapping[int, Sequence[str]]) -> None:
        """Add an episode of the same task for each stale episode, with an event `episode_stale`."""
        now = self._clock.now()

        def add(connection: Connection) -> None:
            for index, of_group in names.items():
                members = connection.execute(
                    select(episodes.c.episode_id, episodes.c.sample_index, episodes.c.task_id, episodes.c.task_data)
                    .where(episodes.c.kind == kind, episodes.c.group_index == index)
                    .order_by(episodes.c.sample_index)
                ).all()
                tasks = {row.episode_id: (row.task_id, row.task_data) for row in members}
                new = enumerate(of_group, members[-1].sample_index + 1)
                rows = [_new_episode(kind, index, sample, *tasks[name]) for sample, name in new]
                _INSERT_EPISODE.change_many(connection, rows)
                for name in of_group:
                    insert_event(connection, "episode_stale", {"episode_id": name, "step": step}, now)

        await self._db.write(add)
        for index, of_group in names.items():
            self.open.add(kind, step, index, len(of_group))
        self.available.notify(sum(map(len, names.values())))

    @shielded
    async def register_recorded(self, group_index: int, step: int, recorded: Sequence[RecordedEpisode]) -> None:
        """Add a training group of episodes that were played elsewhere, with their calls; an existing group is not
        changed.
        """
        names = [episode_name("train", group_index, sample) for sample in range(len(recorded))]
        group = {"kind": "train", "group_index": group_index, "step": step, "task_id": recorded[0].task.task_id}
        rows = [
            _recorded_row(each) | {"episode_id": name, "group_index": group_index, "sample_index": sample}
            for sample, (name, each) in enumerate(zip(names, recorded, strict=True))
        ]
        calls = [
            chat_row(call) | {"episode_id": name}
            for name, each in zip(names, recorded, strict=True)
            for call in each.calls
        ]

        def register(connection: Connection) -> None:
            where = (groups.c.kind == "train", groups.c.group_index == group_index)
            if connection.execute(select(groups.c.size).where(*where)).first():
                return
            connection.execute(groups.insert(), group | {"size": len(rows), "state": GroupState.READY.value})
            connection.execute(episodes.insert(), rows)
            if calls:
                connection.execute(chats.insert(), calls)

        await self._db.write(register)

    async def of_step(self, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[EpisodeRecord]]]:
        """Return the groups of a step in canonical order, each with its episodes."""
        return await self._db.read(lambda connection: _of_step(connection, kind, step))

    async def after(self, kind: EpisodeKind, step: int) -> list[GroupRecord]:
        """Return the groups of all steps after this one, in canonical order."""
        wanted = select(groups).where(groups.c.kind == kind, groups.c.step > step).order_by(groups.c.group_index)
        return await self._db.read(lambda connection: [_record(row) for row in connection.execute(wanted)])

    async def settled_of_step(self, kind: EpisodeKind, step: int) -> tuple[int, int]:
        """Return (settled episodes, all episodes) of a step's groups, without replaced ones."""

        def query(connection: Connection) -> tuple[int, int]:
            done, due = connection.execute(_SETTLED_OF_STEP, {"kind": kind, "step": step}).one()
            return int(done), int(due)

        return await self._db.read(query)

    async def replies_of_step(self, kind: EpisodeKind, step: int) -> tuple[int, int]:
        """Return (replies, replies that reached max_tokens) of a step's episodes under their last leases."""

        def query(connection: Connection) -> tuple[int, int]:
            replies, cut = connection.execute(_REPLIES_OF_STEP, {"kind": kind, "step": step}).one()
            return int(replies), int(cut)

        return await self._db.read(query)

    async def sampled_tokens(self, steps: range, policies: Sequence[str]) -> int:
        """Return the number of tokens that policies sampled in the completed training episodes of steps."""
        return sum((await self.tokens_by_group(steps, policies)).values())

    async def tokens_by_group(self, steps: range, policies: Sequence[str]) -> dict[int, int]:
        """Return the tokens that policies sampled in the completed training episodes of steps, by group index.

        They include calls of last leases, and dropped groups. Groups without any are left out.
        """
        in_steps = (groups.c.kind == "train", groups.c.step >= steps.start, groups.c.step < steps.stop)
        of_steps = select(groups.c.group_index).where(*in_steps)
        wanted = (
            select(episodes.c.group_index, chats.c.versions)
            .join(episodes, OF_LAST_LEASE)
            .where(episodes.c.kind == "train", episodes.c.group_index.in_(of_steps))
            .where(episodes.c.state == EpisodeState.COMPLETED.value, chats.c.policy.in_(policies))
        )

        def query(connection: Connection) -> dict[int, int]:
            found = Counter[int]()
            for index, versions in connection.execute(wanted):
                found[index] += sum(tokens for *_, tokens in orjson.loads(versions))
            return found

        return await self._db.read(query)

    async def discard_reasons(self, kind: EpisodeKind, step: int) -> list[str]:
        """Return the reasons of a step's discarded episodes, including dropped groups."""
        wanted = (
            select(episodes.c.reason)
            .where(episodes.c.kind == kind, episodes.c.group_index.in_(_INDICES))
            .where(episodes.c.state == EpisodeState.DISCARDED.value)
            .order_by(episodes.c.group_index, episodes.c.sample_index)
        )

        def query(connection: Connection) -> list[str]:
            return [reason or "" for reason in connection.execute(wanted, {"kind": kind, "step": step}).scalars()]

        return await self._db.read(query)

    async def number_open(self, kind: EpisodeKind) -> int:
        """Return the number of groups with unfinished episodes."""
        states = [state.value for state in OPEN_STATES]
        wanted = select(func.count(sa.distinct(episodes.c.group_index))).where(
            episodes.c.state.in_(states), episodes.c.kind == kind
        )
        return await self._db.read(lambda connection: int(connection.execute(wanted).scalar_one()))

    async def now(self, kind: EpisodeKind, step: int) -> list[GroupNow]:
        """Return the states of the groups of a step in canonical order."""

        def query(connection: Connection) -> list[GroupNow]:
            found = connection.execute(_OF_STEP, {"kind": kind, "step": step})
            return [GroupNow(index, GroupState(state), bool(is_open)) for index, state, is_open in found]

        return await self._db.read(query)

    async def alive(self, kind: EpisodeKind, steps: range) -> dict[int, int]:
        """Return the number of groups that were not replaced, by step; steps without any are left out."""
        wanted = (
            select(groups.c.step, func.count())
            .where(groups.c.kind == kind, groups.c.step >= steps.start, groups.c.step < steps.stop)
            .where(groups.c.state.not_in([state.value for state in REPLACED]))
            .group_by(groups.c.step)
        )
        return await self._db.read(lambda connection: {step: n for step, n in connection.execute(wanted)})

    async def played(self, kind: EpisodeKind, indices: Sequence[int]) -> dict[int, Played]:
        """Return the played episodes of groups, by group index."""

        def query(connection: Connection) -> dict[int, Played]:
            found = {index: Played([], 0) for index in indices}
            for piece in pieces(indices):
                wanted = (
                    select(episodes.c.group_index, episodes.c.episode_id, episodes.c.state)
                    .where(episodes.c.kind == kind, episodes.c.group_index.in_(piece))
                    .order_by(episodes.c.group_index, episodes.c.sample_index)
                )
                for index, name, state in connection.execute(wanted):
                    if state == EpisodeState.COMPLETED:
                        found[index].completed.append(name)
                    elif state == EpisodeState.DISCARDED:
                        found[index] = found[index]._replace(discarded=found[index].discarded + 1)
            return found

        return await self._db.read(query)

    async def wait_settled(self, kind: EpisodeKind, step: int) -> None:
        """Wait until no episode of a step is open."""
        while any(group.is_open for group in await self.now(kind, step)):
            await self.open.wait(kind, step, 1, WAKE_SECONDS)

    async def settle(self, kind: EpisodeKind, following: Mapping[int, GroupState]) -> None:
        """Move groups from OPEN to READY, DROPPED or SKIPPED, in one transaction.

        A group already in its new state is not changed. Replaced groups get an event `group_dropped` or
        `group_skipped`.
        """
        now = self._clock.now()

        def change(connection: Connection) -> None:
            of_kind = groups.c.kind == kind
            known = select(groups.c.group_index, groups.c.step, groups.c.state).where(of_kind)
            changed = [
                row
                for piece in pieces(list(following))
                for row in connection.execute(known.where(groups.c.group_index.in_(piece)))
                if row.state != following[row.group_index]
            ]
            for row in changed:
                check_transition(f"group {kind} {row.group_index}", GroupState(row.state), following[row.group_index])
            for state in sorted(set(following.values())):
                for piece in pieces([row.group_index for row in changed if following[row.group_index] is state]):
                    which = (of_kind, groups.c.group_index.in_(piece))
                    connection.execute(sa.update(groups).where(*which).values(state=state.value))
            for row in changed:
                if (state := following[row.group_index]) in REPLACED:
                    data = {"group_index": row.group_index, "step": row.step}
                    insert_event(connection, f"group_{state.value}", data, now)

        await self._db.write(change)

    async def next_index(self, kind: EpisodeKind) -> int:
        """Return the index of the next group of this kind: one more than the largest."""
        wanted = select(func.coalesce(func.max(groups.c.group_index), -1) + 1).where(groups.c.kind == kind)
        return await self._db.read(lambda connection: int(connection.execute(wanted).scalar_one()))


def _of_step(connection: Connection, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[EpisodeRecord]]]:
    """Read the groups of a step with their episodes, by two queries."""
    of_step = select(groups).where(groups.c.kind == kind, groups.c.step == step).order_by(groups.c.group_index)
    records = [_record(row) for row in connection.execute(of_step)]
    if not records:
        return []
    members: dict[int, list[EpisodeRecord]] = {record.group_index: [] for record in records}
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


def _record(row: Any) -> GroupRecord:
    """Return a group from its row."""
    return GroupRecord(
        kind=row.kind,
        group_index=row.group_index,
        step=row.step,
        task_id=row.task_id,
        size=row.size,
        state=GroupState(row.state),
    )


def open_groups(connection: Connection) -> OpenGroups:
    """Return the groups of a store with unfinished episodes."""
    return OpenGroups((kind, step, index, number) for kind, step, index, number in connection.execute(_OPEN))


def _new_episode(kind: EpisodeKind, group_index: int, sample: int, task_id: str, task_data: str) -> dict[str, Any]:
    return {
        "episode_id": episode_name(kind, group_index, sample),
        "kind": kind,
        "group_index": group_index,
        "sample_index": sample,
        "task_id": task_id,
        "task_data": task_data,
        "state": EpisodeState.REGISTERED.value,
    }


def _recorded_row(recorded: RecordedEpisode) -> dict[str, Any]:
    """Return the row of an episode that was played elsewhere, without its place."""
    return end_columns(recorded) | {
        "kind": "train",
        "task_id": recorded.task.task_id,
        "task_data": to_json(recorded.task.data),
        "state": EpisodeState.COMPLETED.value,
    }
