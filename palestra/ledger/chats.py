"""The calls of an episode. A call is stored without what its parent has, so n turns take O(total) bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import BindParameter, Connection, bindparam, select

from palestra.ledger.codec import chat_of, chat_row
from palestra.ledger.episodes import held, read
from palestra.ledger.statements import Prepared
from palestra.ledger.tables import chats, episodes
from palestra.schemas.records import Chat, Episode, StepTimes, TimeStep, Trajectory
from palestra.schemas.states import EpisodeState

_LEASE: dict[str, BindParameter[Any]] = {"episode_id": bindparam("episode_id"), "fence": bindparam("fence")}
_INSERT_IF_HELD = Prepared(
    chats.insert().from_select(
        [column.name for column in chats.c],
        select(*(bindparam(column.name, type_=column.type) for column in chats.c))
        .select_from(episodes)
        .where(
            *(episodes.c[name] == value for name, value in _LEASE.items()),
            episodes.c.state == EpisodeState.CLAIMED.value,
        ),
    )
)
_OF_LEASE = Prepared(
    select(chats).where(*(chats.c[name] == value for name, value in _LEASE.items())).order_by(chats.c.idx)
)
_CHUNK = 500  # SQLite allows a limited number of bound values


def append(connection: Connection, chat: Chat) -> None:
    """Record a call, if its lease still stands."""
    if _INSERT_IF_HELD.change(connection, chat_row(chat)) == 0:
        held(connection, chat.episode_id, chat.fence)  # raises what is the matter
        raise AssertionError(f"a call of episode {chat.episode_id}, which is held, was not recorded")


def of_lease(connection: Connection, episode_id: str, fence: int) -> tuple[Chat, ...]:
    """The calls recorded under one lease, in order of index."""
    found: dict[int, Chat] = {}
    for row in _OF_LEASE.rows(connection, {"episode_id": episode_id, "fence": fence}):
        found[row.idx] = chat_of(row, found)
    return tuple(found.values())


def trajectories(connection: Connection, episode_ids: Sequence[str]) -> list[Trajectory]:
    """Episodes with the calls of their last lease, in the order asked for.

    Raises:
        NotFound: one of them does not exist.
    """
    found = [read(connection, episode_id) for episode_id in episode_ids]
    return [
        Trajectory(episode=episode, steps=time_steps(episode, of_lease(connection, episode.episode_id, episode.fence)))
        for episode in found
    ]


def oldest_tokens(connection: Connection, episode_ids: Sequence[str]) -> dict[str, int]:
    """N of the version with which the oldest token of an episode's last lease was sampled."""
    found: dict[str, int] = {}
    for start in range(0, len(episode_ids), _CHUNK):
        wanted = (
            select(chats.c.episode_id, chats.c.versions)
            .join(episodes, (episodes.c.episode_id == chats.c.episode_id) & (episodes.c.fence == chats.c.fence))
            .where(chats.c.episode_id.in_(episode_ids[start : start + _CHUNK]))
        )
        for name, versions in connection.execute(wanted):
            oldest = min((n for _, n, _ in orjson.loads(versions)), default=None)
            if oldest is not None:
                found[name] = min(oldest, found.get(name, oldest))
    return found


def time_steps(episode: Episode, calls: Sequence[Chat]) -> tuple[TimeStep, ...]:
    """Calls by interaction with the environment; rewards by TimeStep where the episode has them."""
    by_step: dict[int, list[Chat]] = {}
    for chat in calls:
        by_step.setdefault(chat.time_step, []).append(chat)
    rewards, times = episode.step_rewards or (), episode.step_times or ()
    last = max(by_step, default=-1)
    over = episode.state is EpisodeState.COMPLETED
    return tuple(
        TimeStep(
            index=index,
            chats=tuple(group),
            reward=rewards[index] if index < len(rewards) else None,
            observed_at=times[index].observed_at if index < len(times) else min(chat.started_at for chat in group),
            acted_at=_acted_at(times[index : index + 1], group),
            terminated=over and index == last,
            truncated=False,
        )
        for index, group in sorted(by_step.items())
    )


def _acted_at(times: Sequence[StepTimes], calls: Sequence[Chat]) -> float:
    acted = times[0].acted_at if times else None
    return max(chat.finished_at for chat in calls) if acted is None else acted
