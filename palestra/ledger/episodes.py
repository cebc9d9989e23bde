"""The lifecycle of episodes, as operations on a connection. The writer runs one at a time, so each sees the truth."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.errors import ClaimOver, Conflict, EpisodeEnded, EpisodeLeaseExpired, InvalidRequest, NotFound
from palestra.ledger.codec import episode_of, to_json
from palestra.ledger.statements import Prepared
from palestra.ledger.tables import chats, episodes, groups
from palestra.schemas.protocols import Counts, GroupRecord
from palestra.schemas.records import Episode, EpisodeKind, StepTimes, Task
from palestra.schemas.states import EpisodeState, GroupState, check_transition

_BY_ID = Prepared(select(episodes).where(episodes.c.episode_id == bindparam("episode_id")))
_BY_REQUEST = Prepared(select(episodes).where(episodes.c.claim_request_id == bindparam("request_id")))
_NEXT = Prepared(
    select(episodes)
    .where(episodes.c.state == EpisodeState.REGISTERED.value, episodes.c.kind == bindparam("kind"))
    .order_by(episodes.c.group_index, episodes.c.sample_index)
    .limit(1)
)
_LAST_STEP = Prepared(
    select(func.max(chats.c.time_step)).where(
        chats.c.episode_id == bindparam("episode_id"), chats.c.fence == bindparam("fence")
    )
)
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
_COUNT = select(func.count()).where(episodes.c.state == bindparam("state"), episodes.c.kind == bindparam("kind"))
OPEN_STATES = (EpisodeState.REGISTERED, EpisodeState.CLAIMED)
CLAIM_ORDER: tuple[EpisodeKind, ...] = ("validation", "train")  # ad-hoc episodes are claimed by id only


def episode_name(kind: EpisodeKind, group_index: int, sample_index: int) -> str:
    """The id of a scheduled episode: the same in every run of a job."""
    return f"{kind}-{group_index:06d}-{sample_index:02d}"


def kind_of(episode_id: str) -> str:
    """The kind that an id tells."""
    return episode_id.partition("-")[0]


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


def register_adhoc(connection: Connection, task: Task, request_id: str) -> str:
    """An episode outside the schedule; the same `request_id` gives the same one."""
    episode_id = "adhoc-" + hashlib.sha256(request_id.encode()).hexdigest()[:16]
    if _BY_ID.row(connection, {"episode_id": episode_id}) is None:
        number = connection.execute(
            select(func.coalesce(func.max(episodes.c.group_index), -1) + 1).where(episodes.c.kind == "adhoc")
        ).scalar_one()
        connection.execute(
            episodes.insert(),
            {
                "episode_id": episode_id,
                "kind": "adhoc",
                "group_index": number,
                "sample_index": 0,
                "task_id": task.task_id,
                "task_data": to_json(task.data),
                "state": EpisodeState.REGISTERED.value,
            },
        )
    return episode_id


def read(connection: Connection, episode_id: str) -> Episode:
    """One episode.

    Raises:
        NotFound: no such episode.
    """
    return _episode(_BY_ID.row(connection, {"episode_id": episode_id}), episode_id)


def _episode(row: Any, episode_id: str) -> Episode:
    if row is None:
        raise NotFound(f"there is no episode {episode_id!r}")
    return episode_of(row)


def claim(
    connection: Connection,
    worker_id: str,
    request_id: str,
    lease_seconds: float,
    episode_id: str | None,
    now: float,
) -> Episode | None:
    """The next registered episode in canonical order, or the one named; a known `request_id` gets its claim again.

    Raises:
        ClaimOver: the claim of this `request_id` is over.
        IllegalTransition: the episode named is not registered.
    """
    known = _BY_REQUEST.row(connection, {"request_id": request_id})
    if known is not None:
        if known.state != EpisodeState.CLAIMED:
            raise ClaimOver(
                f"the claim {request_id!r} is over: episode {known.episode_id} is {known.state}; claim anew"
            )
        return episode_of(known)
    found = read(connection, episode_id) if episode_id is not None else _next(connection)
    if found is None:
        return None
    check_transition(f"episode {found.episode_id}", found.state, EpisodeState.CLAIMED)
    claimed = replace(
        found,
        state=EpisodeState.CLAIMED,
        fence=found.fence + 1,
        attempts=found.attempts + 1,
        worker_id=worker_id,
        lease_seconds=lease_seconds,
    )
    changed = {
        "fence": claimed.fence,
        "attempts": claimed.attempts,
        "worker_id": worker_id,
        "claim_request_id": request_id,
        "lease_seconds": lease_seconds,
        "claimed_at": now,
    }
    _change(connection, found, EpisodeState.CLAIMED, changed)
    return claimed


def held(connection: Connection, episode_id: str, fence: int) -> Episode:
    """The episode, if it is claimed under this fence.

    Raises:
        EpisodeLeaseExpired, EpisodeEnded: it is not, or no longer.
    """
    return _held(read(connection, episode_id), fence)


def _held(episode: Episode, fence: int) -> Episode:
    episode_id = episode.episode_id
    if episode.fence != fence or episode.state is EpisodeState.REGISTERED:
        raise EpisodeLeaseExpired(
            f"episode {episode_id} is no longer yours (claim {fence} of {episode.fence}): its lease ran out or it was "
            "given back; claim again"
        )
    if episode.state is not EpisodeState.CLAIMED:
        raise EpisodeEnded(f"episode {episode_id} is {episode.state}; nothing can be added to it")
    return episode


def end(
    connection: Connection,
    episode_id: str,
    fence: int,
    rewards: Mapping[str, float],
    step_rewards: Sequence[float] | None,
    step_times: Sequence[StepTimes] | None,
    extra: Mapping[str, Any],
    now: float,
) -> bool:
    """Complete an episode. True: now; False: it was, with the same body."""
    body: dict[str, str | None] = {
        "rewards": to_json(dict(rewards)),
        "step_rewards": None if step_rewards is None else to_json(list(step_rewards)),
        "metadata": to_json(dict(extra)),
    }
    digest = hashlib.sha256(to_json(sorted(body.items())).encode()).hexdigest()
    body["step_times"] = None if step_times is None else to_json([list(times) for times in step_times])
    row = _BY_ID.row(connection, {"episode_id": episode_id})
    if row is not None and row.fence == fence and row.state == EpisodeState.COMPLETED:
        if row.end_digest == digest:
            return False
        raise Conflict(f"episode {episode_id} was ended before with another body; the first one stands")
    episode = _held(_episode(row, episode_id), fence)
    if step_rewards is not None:
        _one_for_each_step(connection, episode, len(step_rewards))
    _change(connection, episode, EpisodeState.COMPLETED, {**body, "end_digest": digest, "ended_at": now})
    return True


def _one_for_each_step(connection: Connection, episode: Episode, rewards: int) -> None:
    """More are fine: the environment may go on without a call."""
    last = _LAST_STEP.row(connection, {"episode_id": episode.episode_id, "fence": episode.fence})[0]
    if last is not None and rewards <= last:
        raise InvalidRequest(
            f"step_rewards has {rewards} rewards, and the calls of episode {episode.episode_id} belong to TimeSteps 0 "
            f"to {last}; give one for each, or send `x-palestra-step` with the calls to say which they belong to",
            "step_rewards",
        )


def give_back(
    connection: Connection,
    episode_id: str,
    fence: int,
    reason: str,
    discard: bool,
    max_attempts: int,
    now: float,
    counts: bool = True,
) -> Episode:
    """CLAIMED → REGISTERED; or → DISCARDED, if asked for or when its attempts are used up.

    Where the attempt does not count, it is as if it had never been made.
    """
    episode = held(connection, episode_id, fence)
    attempts = episode.attempts if counts else episode.attempts - 1
    final = discard or attempts >= max_attempts
    following = EpisodeState.DISCARDED if final else EpisodeState.REGISTERED
    changed = {"reason": reason, "ended_at": now if final else None, "attempts": attempts}
    _change(connection, episode, following, changed)
    return read(connection, episode_id)


def live(connection: Connection) -> list[Episode]:
    """All claimed episodes."""
    rows = connection.execute(select(episodes).where(episodes.c.state == EpisodeState.CLAIMED.value))
    return [episode_of(row) for row in rows]


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


def discarded(connection: Connection, kind: EpisodeKind) -> int:
    """How many episodes of this kind were discarded."""
    return int(connection.execute(_COUNT, {"kind": kind, "state": EpisodeState.DISCARDED.value}).scalar_one())


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


def counts(connection: Connection) -> Counts:
    """Episodes in each state."""
    rows = connection.execute(select(episodes.c.state, func.count()).group_by(episodes.c.state))
    found: dict[str, int] = {state: number for state, number in rows}
    return Counts(**{state.value: found.get(state.value, 0) for state in EpisodeState})


def _next(connection: Connection) -> Episode | None:
    for kind in CLAIM_ORDER:
        row = _NEXT.row(connection, {"kind": kind})
        if row is not None:
            return episode_of(row)
    return None


def _change(connection: Connection, episode: Episode, following: EpisodeState, values: Mapping[str, Any]) -> None:
    """The only place where an episode's state is written."""
    check_transition(f"episode {episode.episode_id}", episode.state, following)
    known = {"b_id": episode.episode_id, "b_fence": episode.fence, "b_state": following.value}
    _changing(tuple(values)).change(connection, known | {f"v_{name}": value for name, value in values.items()})


@cache
def _changing(columns: tuple[str, ...]) -> Prepared:
    """The statement that gives an episode a state, and new values to these columns."""
    return Prepared(
        sa.update(episodes)
        .where(episodes.c.episode_id == bindparam("b_id"), episodes.c.fence == bindparam("b_fence"))
        .values(state=bindparam("b_state"), **{name: bindparam(f"v_{name}") for name in columns})
    )
