"""The lifecycle of episodes, as operations on a connection. The writer runs one at a time, so each sees the truth."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.errors import ClaimOver, Conflict, EpisodeEnded, EpisodeLeaseExpired, InvalidRequest, NotFound
from palestra.ledger.codec import episode_of, to_json
from palestra.ledger.tables import chats, episodes, groups
from palestra.schemas.protocols import Counts, GroupRecord
from palestra.schemas.records import Episode, EpisodeKind, Task
from palestra.schemas.states import EpisodeState, GroupState, check_transition

_BY_ID = select(episodes).where(episodes.c.episode_id == bindparam("episode_id"))
_BY_REQUEST = select(episodes).where(episodes.c.claim_request_id == bindparam("request_id"))
_NEXT = (
    select(episodes)
    .where(episodes.c.state == EpisodeState.REGISTERED.value, episodes.c.kind == bindparam("kind"))
    .order_by(episodes.c.group_index, episodes.c.sample_index)
    .limit(1)
)
_CHANGE = (
    sa.update(episodes)
    .where(episodes.c.episode_id == bindparam("b_id"), episodes.c.fence == bindparam("b_fence"))
    .values(state=bindparam("b_state"))
)
_ANY = (
    select(episodes.c.episode_id)
    .where(episodes.c.state == bindparam("state"), episodes.c.kind == bindparam("kind"))
    .limit(1)
)
_COUNT = select(func.count()).where(episodes.c.state == bindparam("state"), episodes.c.kind == bindparam("kind"))
OPEN_STATES = (EpisodeState.REGISTERED, EpisodeState.CLAIMED)
CLAIM_ORDER: tuple[EpisodeKind, ...] = ("validation", "train")  # ad-hoc episodes are claimed by id only


def episode_name(kind: EpisodeKind, group_index: int, sample_index: int) -> str:
    """The id of a scheduled episode: the same in every run of a job."""
    return f"{kind}-{group_index:06d}-{sample_index:02d}"


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
    data = to_json(task.data)
    connection.execute(
        episodes.insert(),
        [
            {
                "episode_id": episode_name(kind, group_index, sample),
                "kind": kind,
                "group_index": group_index,
                "sample_index": sample,
                "task_id": task.task_id,
                "task_data": data,
                "state": EpisodeState.REGISTERED.value,
            }
            for sample in range(size)
        ],
    )
    return size


def register_adhoc(connection: Connection, task: Task, request_id: str) -> str:
    """An episode outside the schedule; the same `request_id` gives the same one."""
    episode_id = "adhoc-" + hashlib.sha256(request_id.encode()).hexdigest()[:16]
    if connection.execute(_BY_ID, {"episode_id": episode_id}).first() is None:
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
    row = connection.execute(_BY_ID, {"episode_id": episode_id}).first()
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
    known = connection.execute(_BY_REQUEST, {"request_id": request_id}).first()
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
    changed = {
        "fence": found.fence + 1,
        "attempts": found.attempts + 1,
        "worker_id": worker_id,
        "claim_request_id": request_id,
        "lease_seconds": lease_seconds,
        "claimed_at": now,
    }
    _change(connection, found, EpisodeState.CLAIMED, changed)
    return read(connection, found.episode_id)


def held(connection: Connection, episode_id: str, fence: int) -> Episode:
    """The episode, if it is claimed under this fence.

    Raises:
        EpisodeLeaseExpired, EpisodeEnded: it is not, or no longer.
    """
    episode = read(connection, episode_id)
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
    extra: Mapping[str, Any],
    now: float,
) -> bool:
    """Complete an episode. True: now; False: it was, with the same body."""
    body = {
        "rewards": to_json(dict(rewards)),
        "step_rewards": None if step_rewards is None else to_json(list(step_rewards)),
        "metadata": to_json(dict(extra)),
    }
    digest = hashlib.sha256(to_json(sorted(body.items())).encode()).hexdigest()
    row = connection.execute(_BY_ID, {"episode_id": episode_id}).first()
    if row is not None and row.fence == fence and row.state == EpisodeState.COMPLETED:
        if row.end_digest == digest:
            return False
        raise Conflict(f"episode {episode_id} was ended before with another body; the first one stands")
    episode = held(connection, episode_id, fence)
    if step_rewards is not None:
        _one_for_each_step(connection, episode, len(step_rewards))
    _change(connection, episode, EpisodeState.COMPLETED, {**body, "end_digest": digest, "ended_at": now})
    return True


def _one_for_each_step(connection: Connection, episode: Episode, rewards: int) -> None:
    """More are fine: the environment may go on without a call."""
    of_lease = (chats.c.episode_id == episode.episode_id) & (chats.c.fence == episode.fence)
    last = connection.execute(select(func.max(chats.c.time_step)).where(of_lease)).scalar()
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
) -> Episode:
    """CLAIMED → REGISTERED; or → DISCARDED, if asked for or when its attempts are used up."""
    episode = held(connection, episode_id, fence)
    final = discard or episode.attempts >= max_attempts
    following = EpisodeState.DISCARDED if final else EpisodeState.REGISTERED
    _change(connection, episode, following, {"reason": reason, "ended_at": now if final else None})
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


def progress(connection: Connection, kind: EpisodeKind) -> tuple[bool, int]:
    """(whether an episode of this kind may still be completed, how many were discarded); no scan of the others."""
    is_open = any(connection.execute(_ANY, {"kind": kind, "state": state.value}).first() for state in OPEN_STATES)
    discarded = connection.execute(_COUNT, {"kind": kind, "state": EpisodeState.DISCARDED.value}).scalar_one()
    return is_open, int(discarded)


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
        row = connection.execute(_NEXT, {"kind": kind}).first()
        if row is not None:
            return episode_of(row)
    return None


def _change(connection: Connection, episode: Episode, following: EpisodeState, values: Mapping[str, Any]) -> None:
    """The only place where an episode's state is written."""
    check_transition(f"episode {episode.episode_id}", episode.state, following)
    names: dict[str, Any] = {name: bindparam(f"v_{name}") for name in values}
    connection.execute(
        _CHANGE.values(names),
        {
            "b_id": episode.episode_id,
            "b_fence": episode.fence,
            "b_state": following.value,
            **{f"v_{name}": value for name, value in values.items()},
        },
    )
