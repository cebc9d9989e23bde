"""The calls of an episode. A call is stored without what its parent has, so n turns take O(total) bytes."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, select

from palestra.errors import NotFound
from palestra.ledger.codec import chat_of, chat_row, episode_of
from palestra.ledger.episodes import held
from palestra.ledger.tables import chats, episodes
from palestra.schemas.records import Chat, Episode, TimeStep, Trajectory
from palestra.schemas.states import EpisodeState

_INSERT = chats.insert()
_OF_LEASE = (
    select(chats)
    .where(chats.c.episode_id == bindparam("episode_id"), chats.c.fence == bindparam("fence"))
    .order_by(chats.c.idx)
)
_CHUNK = 500  # SQLite allows a limited number of bound values


def append(connection: Connection, chat: Chat) -> None:
    """Record a call, if its lease still stands."""
    held(connection, chat.episode_id, chat.fence)
    connection.execute(_INSERT, chat_row(chat))


def of_lease(connection: Connection, episode_id: str, fence: int) -> tuple[Chat, ...]:
    """The calls recorded under one lease, in order of index."""
    found: dict[int, Chat] = {}
    for row in connection.execute(_OF_LEASE, {"episode_id": episode_id, "fence": fence}):
        found[row.idx] = chat_of(row, found)
    return tuple(found.values())


def trajectories(connection: Connection, episode_ids: Sequence[str]) -> list[Trajectory]:
    """Episodes with the calls of their last lease, in the order asked for.

    Raises:
        NotFound: one of them does not exist.
    """
    found: dict[str, Episode] = {}
    for start in range(0, len(episode_ids), _CHUNK):
        chunk = episode_ids[start : start + _CHUNK]
        for row in connection.execute(select(episodes).where(episodes.c.episode_id.in_(chunk))):
            found[row.episode_id] = episode_of(row)
    missing = [episode_id for episode_id in episode_ids if episode_id not in found]
    if missing:
        raise NotFound(f"there is no episode {missing[0]!r}")
    return [
        Trajectory(episode=found[i], steps=time_steps(found[i], of_lease(connection, i, found[i].fence)))
        for i in episode_ids
    ]


def time_steps(episode: Episode, calls: Sequence[Chat]) -> tuple[TimeStep, ...]:
    """Calls by interaction with the environment; rewards by TimeStep where the episode has them."""
    by_step: dict[int, list[Chat]] = {}
    for chat in calls:
        by_step.setdefault(chat.time_step, []).append(chat)
    rewards = episode.step_rewards or ()
    last = max(by_step, default=-1)
    over = episode.state is EpisodeState.COMPLETED
    return tuple(
        TimeStep(
            index=index,
            chats=tuple(group),
            reward=rewards[index] if index < len(rewards) else None,
            terminated=over and index == last,
            truncated=False,
        )
        for index, group in sorted(by_step.items())
    )
