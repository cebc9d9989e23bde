"""The groups of a job: registered whole, and settled when all of their episodes are."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.database import WAKE_SECONDS, Database, Notifier, shielded, to_json
from palestra.store.codec import chat_row, episode_of, rewards_to_json
from palestra.store.lifecycle import episode_name
from palestra.store.tables import chats, episodes, groups
from palestra.types.progress import GroupRecord
from palestra.types.records import EpisodeKind, EpisodeRecord, RecordedEpisode, Task
from palestra.types.states import REPLACED, EpisodeState, GroupState, check_transition

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
        groups.c.state.not_in([state.value for state in REPLACED]),
    )
)
_REPLIES_OF_STEP = (
    select(func.count(), func.count().filter(chats.c.finish_reason == "length"))
    .join(episodes, (episodes.c.episode_id == chats.c.episode_id) & (episodes.c.fence == chats.c.fence))
    .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
    .where(groups.c.kind == bindparam("kind"), groups.c.step == bindparam("step"))
)
_COUNT = select(func.count()).where(episodes.c.state == bindparam("state"), episodes.c.kind == bindparam("kind"))


class Groups:
    """Registers groups of episodes, and waits for them. The learner decides when a group is ready or replaced.

    A method that changes something returns when the change is on disk.

    Attributes:
        available: notified when episodes can be claimed.
        settled: notified when an episode was completed or discarded.
    """

    def __init__(self, db: Database, available: Notifier, settled: Notifier) -> None:
        self._db, self.available, self.settled = db, available, settled

    @shielded
    async def register(
        self, kind: EpisodeKind, group_index: int, step: int, task: Task, size: int, others: Sequence[Task] = ()
    ) -> None:
        """Register a group and its episodes; a group that exists already is not changed.

        Args:
            group_index: position of the group in the canonical order of its kind.
            step: train: the step that trains on it; validation: the number of steps after which it is scored.
            task: what its episodes play; the group's name in lists.
            others: further tasks, which its episodes play in turn with `task`.
        """
        tasks = (task, *others)

        def register(connection: Connection) -> int:
            """Return how many episodes were added."""
            where = (groups.c.kind == kind, groups.c.group_index == group_index)
            if connection.execute(select(groups.c.size).where(*where)).first():
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
            data = [(one.task_id, to_json(one.data)) for one in tasks]
            _add_episodes(connection, kind, group_index, 0, [data[sample % len(data)] for sample in range(size)])
            return size

        self.available.notify(await self._db.write(register))

    @shielded
    async def register_again(self, kind: EpisodeKind, group_index: int, names: Sequence[str]) -> None:
        """Add an episode of the same task for each of some episodes of a group that can't be used.

        Args:
            names: ids of these episodes.
        """

        def add(connection: Connection) -> None:
            members = connection.execute(
                select(episodes.c.episode_id, episodes.c.sample_index, episodes.c.task_id, episodes.c.task_data)
                .where(episodes.c.kind == kind, episodes.c.group_index == group_index)
                .order_by(episodes.c.sample_index)
            ).all()
            tasks = {row.episode_id: (row.task_id, row.task_data) for row in members}
            first = members[-1].sample_index + 1
            _add_episodes(connection, kind, group_index, first, [tasks[name] for name in names])

        await self._db.write(add)
        self.available.notify(len(names))

    @shielded
    async def register_recorded(self, group_index: int, step: int, recorded: RecordedEpisode) -> None:
        """Enter a training group of one episode that was played elsewhere, complete with its calls.

        A group that exists already is not changed.

        Args:
            group_index: position of the group in the canonical order.

        Raises:
            InvalidRequest: a reward is not finite.
        """
        name = episode_name("train", group_index, 0)
        episode = {
            "episode_id": name,
            "kind": "train",
            "group_index": group_index,
            "sample_index": 0,
            "task_id": recorded.task.task_id,
            "task_data": to_json(recorded.task.data),
            "state": EpisodeState.COMPLETED.value,
            "rewards": rewards_to_json(recorded.rewards),
            "step_rewards": None if recorded.step_rewards is None else rewards_to_json(recorded.step_rewards),
            "step_times": None if recorded.step_times is None else to_json([list(t) for t in recorded.step_times]),
            "named_rewards": None if recorded.named_rewards is None else rewards_to_json(recorded.named_rewards),
            "metadata": to_json(recorded.metadata),
        }
        group = {"kind": "train", "group_index": group_index, "step": step, "task_id": recorded.task.task_id}

        def register(connection: Connection) -> None:
            where = (groups.c.kind == "train", groups.c.group_index == group_index)
            if connection.execute(select(groups.c.size).where(*where)).first():
                return
            connection.execute(groups.insert(), group | {"size": 1, "state": GroupState.READY.value})
            connection.execute(episodes.insert(), episode)
            if recorded.calls:
                connection.execute(chats.insert(), [chat_row(call) | {"episode_id": name} for call in recorded.calls])

        await self._db.write(register)
        self.settled.notify()

    async def of_step(self, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[EpisodeRecord]]]:
        """Return the groups of a step in canonical order, each with its episodes."""
        return await self._db.read(lambda connection: _of_step(connection, kind, step))

    async def settled_of_step(self, kind: EpisodeKind, step: int) -> tuple[int, int]:
        """Return (settled episodes, all episodes) of the groups of a step that were not replaced."""

        def query(connection: Connection) -> tuple[int, int]:
            done, due = connection.execute(_SETTLED_OF_STEP, {"kind": kind, "step": step}).one()
            return int(done), int(due)

        return await self._db.read(query)

    async def replies_of_step(self, kind: EpisodeKind, step: int) -> tuple[int, int]:
        """Return (replies, those that were cut at max_tokens) of the episodes of a step, each of its last lease."""

        def query(connection: Connection) -> tuple[int, int]:
            replies, cut = connection.execute(_REPLIES_OF_STEP, {"kind": kind, "step": step}).one()
            return int(replies), int(cut)

        return await self._db.read(query)

    async def sampled_tokens(self, steps: range, policies: Sequence[str]) -> int:
        """Return how many tokens some policies have sampled in the completed training episodes of some steps.

        Calls of an episode's last lease count, also in groups that were dropped.
        """
        wanted = (
            select(chats.c.versions)
            .join(episodes, (episodes.c.episode_id == chats.c.episode_id) & (episodes.c.fence == chats.c.fence))
            .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
            .where(groups.c.kind == "train", groups.c.step >= steps.start, groups.c.step < steps.stop)
            .where(episodes.c.state == EpisodeState.COMPLETED.value, chats.c.policy.in_(policies))
        )

        def query(connection: Connection) -> int:
            found = connection.execute(wanted).scalars()
            return sum(tokens for versions in found for _, _, tokens in orjson.loads(versions))

        return await self._db.read(query)

    async def discarded(self, kind: EpisodeKind) -> int:
        """Return how many episodes of this kind were discarded, over the whole run."""
        return await self._db.read(lambda connection: _discarded(connection, kind))

    async def discard_reasons(self, kind: EpisodeKind, step: int) -> list[str]:
        """Return why each discarded episode of a step was discarded, dropped groups included."""
        wanted = (
            select(episodes.c.reason)
            .join(groups, (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index))
            .where(episodes.c.kind == kind, groups.c.step == step, episodes.c.state == EpisodeState.DISCARDED.value)
            .order_by(episodes.c.group_index, episodes.c.sample_index)
        )

        def query(connection: Connection) -> list[str]:
            return [reason or "" for reason in connection.execute(wanted).scalars()]

        return await self._db.read(query)

    async def number_open(self, kind: EpisodeKind) -> int:
        """Return how many groups have an episode that may still be completed."""
        states = [state.value for state in OPEN_STATES]
        wanted = select(func.count(sa.distinct(episodes.c.group_index))).where(
            episodes.c.state.in_(states), episodes.c.kind == kind
        )
        return await self._db.read(lambda connection: int(connection.execute(wanted).scalar_one()))

    async def wait_settled(self, kind: EpisodeKind, step: int, discarded: int) -> None:
        """Return when no episode of a step is open, or when an episode of its kind was discarded.

        Args:
            discarded: how many episodes of this kind were discarded when the caller last read it; another number ends
                the wait, because a group may have to be replaced.
        """

        def query(connection: Connection) -> tuple[bool, int]:
            is_open = any(
                connection.execute(_OPEN_OF_STEP, {"kind": kind, "step": step, "state": state.value}).first()
                for state in OPEN_STATES
            )
            return is_open, _discarded(connection, kind)

        while True:
            seen = self.settled.count
            is_open, now = await self._db.read(query)
            if not is_open or now != discarded:
                return
            await self.settled.wait(WAKE_SECONDS, seen)

    async def settle(self, kind: EpisodeKind, group_index: int, following: GroupState) -> None:
        """Move a group from OPEN to READY, DROPPED or SKIPPED; does nothing if the group is already in that state.

        Raises:
            IllegalTransition: the group was settled in the other way.
        """

        def change(connection: Connection) -> None:
            where = (groups.c.kind == kind, groups.c.group_index == group_index)
            current = GroupState(connection.execute(select(groups.c.state).where(*where)).scalar_one())
            if current is following:
                return
            check_transition(f"group {kind} {group_index}", current, following)
            connection.execute(sa.update(groups).where(*where).values(state=following.value))

        await self._db.write(change)

    async def next_index(self, kind: EpisodeKind) -> int:
        """Return the index of the next group of this kind: one more than the largest."""
        wanted = select(func.coalesce(func.max(groups.c.group_index), -1) + 1).where(groups.c.kind == kind)
        return await self._db.read(lambda connection: int(connection.execute(wanted).scalar_one()))


def _of_step(connection: Connection, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[EpisodeRecord]]]:
    """Read the groups of a step with their episodes, by two queries."""
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


def _discarded(connection: Connection, kind: EpisodeKind) -> int:
    """Return how many episodes of this kind were discarded."""
    return int(connection.execute(_COUNT, {"kind": kind, "state": EpisodeState.DISCARDED.value}).scalar_one())


def _add_episodes(
    connection: Connection, kind: EpisodeKind, group_index: int, first: int, tasks: Sequence[tuple[str, str]]
) -> None:
    """Insert registered episodes into a group."""
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
            for sample, (task_id, task_data) in enumerate(tasks, first)
        ],
    )
