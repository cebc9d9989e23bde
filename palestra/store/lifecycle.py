"""The lifecycle of an episode, as operations on a connection.

The writing thread runs operations one after another, so each sees the changes of all earlier ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from palestra.database import to_json
from palestra.database.sqlite import Prepared
from palestra.errors import (
    CallsRefused,
    Conflict,
    ContextOverflow,
    EpisodeEnded,
    EpisodeLeaseExpired,
    InvalidRequest,
    NotFound,
)
from palestra.store.codec import end_columns, episode_of
from palestra.store.tables import chats, episodes
from palestra.types.records import ON_PURPOSE, REFUSED_CALLS, EpisodeEnd, EpisodeKind, EpisodeRecord
from palestra.types.states import EpisodeState, check_transition

_BY_ID = Prepared(select(episodes).where(episodes.c.episode_id == bindparam("episode_id")))
_CONTEXT_OVERFLOW = ContextOverflow(0, 0).code
_REWARDS = ("rewards", "step_rewards", "named_rewards", "agent_step_rewards")
_ENDED = (*_REWARDS, "step_times", "metadata", "facts")
# CLAIMED → COMPLETED or UNJUDGED of an episode that is held under the fence.
_COMPLETE = Prepared(
    sa.update(episodes)
    .where(
        episodes.c.episode_id == bindparam("b_id"),
        episodes.c.fence == bindparam("b_fence"),
        episodes.c.state == EpisodeState.CLAIMED.value,
    )
    .values(
        {name: bindparam(f"v_{name}") for name in (*_ENDED, "end_digest", "ended_at")} | {"state": bindparam("b_state")}
    )
    .returning(episodes.c.players)
)
_REASON = Prepared(select(episodes.c.reason).where(episodes.c.episode_id == bindparam("episode_id")))
_LAST_STEP = Prepared(
    select(func.max(chats.c.time_step)).where(
        chats.c.episode_id == bindparam("episode_id"), chats.c.fence == bindparam("fence")
    )
)


def episode_name(kind: EpisodeKind, group_index: int, sample_index: int) -> str:
    """Return the id of a scheduled episode, which is the same in every run of a job."""
    return f"{group_name(kind, group_index)}-{sample_index:02d}"


def group_name(kind: EpisodeKind, group_index: int) -> str:
    """Return the common prefix of a group's episode ids."""
    return f"{kind}-{group_index:06d}"


def episode_kind(episode_id: str) -> str:
    """Return the kind of an episode, the first part of its id."""
    return episode_id.partition("-")[0]


def episode_by_id(connection: Connection, episode_id: str) -> EpisodeRecord:
    """Return one episode in the connection's transaction."""
    return _episode(_BY_ID.row(connection, {"episode_id": episode_id}), episode_id)


def _episode(row: Any, episode_id: str) -> EpisodeRecord:
    """Return the episode of a row."""
    if row is None:
        raise NotFound(f"there is no episode {episode_id!r}")
    return episode_of(row)


def held(connection: Connection, episode_id: str, fence: int) -> EpisodeRecord:
    """Return the episode if it is claimed under this fence. Raises EpisodeLeaseExpired or EpisodeEnded if it is not, or
    no longer. Raises NotFound if the episode does not exist.
    """
    return _held(episode_by_id(connection, episode_id), fence)


def _held(episode: EpisodeRecord, fence: int) -> EpisodeRecord:
    """Return the episode if it is claimed under this fence; see `held`."""
    episode_id = episode.episode_id
    if episode.fence != fence or episode.state is EpisodeState.REGISTERED:
        raise EpisodeLeaseExpired(
            f"episode {episode_id} is no longer yours (claim {fence} of {episode.fence}): its lease ran out or it was "
            "given back; claim again"
        )
    if episode.state is not EpisodeState.CLAIMED:
        raise EpisodeEnded(f"episode {episode_id} is {episode.state}; nothing can be added to it")
    return episode


def complete(
    connection: Connection, episode_id: str, fence: int, end: EpisodeEnd, now: float, judged: bool = False
) -> Mapping[str, str] | None:
    """Complete an episode: CLAIMED → COMPLETED. One statement writes its rewards and its state.

    Args:
        now: Unix seconds.
        judged: whether a judge has to score it first: CLAIMED → UNJUDGED.

    Returns:
        The episode's `players`, if it was completed now; None if it was completed before, with the same body.

    Raises:
        Conflict: the episode was completed before with another body.
        EpisodeLeaseExpired, EpisodeEnded, NotFound: the episode is not held under this fence.
        InvalidRequest: there are fewer step rewards than TimeSteps with calls, or a reward is not finite.
        CallsRefused: every model call was refused.
    """
    body = end_columns(end)
    reported = {name: body[name] for name in ("rewards", "step_rewards", "named_rewards", "metadata", "facts")}
    digest = hashlib.sha256(to_json(sorted(reported.items())).encode()).hexdigest()
    if end.refused:
        _check_answered(connection, episode_id, fence, end.refused)
        body["facts"] = to_json({**(end.facts or {}), REFUSED_CALLS: dict(end.refused)})
    last = -1 if end.step_rewards is None else _last_step(connection, episode_id, fence)
    if end.step_rewards is None or len(end.step_rewards) > last:
        given = {f"v_{name}": body[name] for name in _ENDED} | {"v_end_digest": digest, "v_ended_at": now}
        following = EpisodeState.UNJUDGED if judged else EpisodeState.COMPLETED
        given |= {"b_id": episode_id, "b_fence": fence, "b_state": following.value}
        done = _COMPLETE.row(connection, given)
        if done is not None:
            players: dict[str, str] = {} if done.players is None else orjson.loads(done.players)
            return players
    row = _BY_ID.row(connection, {"episode_id": episode_id})
    if row is not None and row.fence == fence and row.state in (EpisodeState.UNJUDGED, EpisodeState.COMPLETED):
        if row.end_digest == digest:
            return None
        raise Conflict(f"episode {episode_id} was ended before with another body; the first one stands")
    _held(_episode(row, episode_id), fence)
    raise InvalidRequest(
        f"step_rewards has {len(end.step_rewards or ())} rewards, and the calls of episode {episode_id} belong to "
        f"TimeSteps 0 to {last}; give one for each, or send `x-palestra-step` with the calls to say which they belong "
        "to",
        "step_rewards",
    )


def _check_answered(connection: Connection, episode_id: str, fence: int, refused: Mapping[str, int]) -> None:
    """Raise CallsRefused if no call of a lease was answered; a prompt that is too long is the agent's own fault."""
    named = [f"{name} ({count})" for name, count in refused.items() if name != _CONTEXT_OVERFLOW]
    if named and _last_step(connection, episode_id, fence) < 0:
        raise CallsRefused(
            f"no model call of episode {episode_id} was answered, so it has no reward; refused: {', '.join(named)}"
        )


def _last_step(connection: Connection, episode_id: str, fence: int) -> int:
    """Return the last TimeStep that has a call under a lease; -1: none has."""
    last = _LAST_STEP.row(connection, {"episode_id": episode_id, "fence": fence})[0]
    return -1 if last is None else int(last)


def judge(connection: Connection, episode_id: str, rewards: EpisodeEnd | None, reason: str) -> bool:
    """End what waits for its verdict: UNJUDGED → COMPLETED; without rewards, UNJUDGED → DISCARDED.

    Return False, without a change, if the episode is over already. `rewards` include those of the judge; None: the
    judge has failed. Raises NotFound if there is no such episode.
    """
    episode = episode_by_id(connection, episode_id)
    if episode.state is not EpisodeState.UNJUDGED:
        return False
    if rewards is None:
        # What the environment gave alone is no reward of the episode.
        set_state(connection, episode, EpisodeState.DISCARDED, {"reason": reason, **dict.fromkeys(_REWARDS)})
        return True
    columns = end_columns(rewards)
    values = {name: columns[name] for name in _REWARDS if columns[name] is not None}
    set_state(connection, episode, EpisodeState.COMPLETED, values)
    return True


def discard_open(connection: Connection, kind: str, group_index: int, reason: str, now: float) -> list[EpisodeRecord]:
    """Discard the episodes of a group that have not been played, and return them as they were."""
    rows = connection.execute(
        select(episodes).where(
            episodes.c.kind == kind,
            episodes.c.group_index == group_index,
            episodes.c.state.in_((EpisodeState.REGISTERED.value, EpisodeState.CLAIMED.value)),
        )
    )
    found = [episode_of(row) for row in rows]
    for episode in found:
        set_state(connection, episode, EpisodeState.DISCARDED, {"reason": reason, "ended_at": now})
    return found


class GivenBack(NamedTuple):
    """Why and how an episode is given back.

    Attributes:
        counts: whether this attempt is one of them; False: the episode has as many attempts left as before the claim.
    """

    reason: str
    discard: bool = False
    counts: bool = True


def give_back(
    connection: Connection, episode_id: str, fence: int, given: GivenBack, max_attempts: int, now: float
) -> EpisodeState:
    """Give an episode back: CLAIMED → REGISTERED, or → DISCARDED on request or when its attempts are used up.

    Args:
        now: Unix seconds.

    Returns:
        The state that the episode has now.

    Raises:
        EpisodeLeaseExpired, EpisodeEnded, NotFound: the episode is not held under this fence.
    """
    episode = held(connection, episode_id, fence)
    reason = given.reason
    attempts = episode.attempts if given.counts else episode.attempts - 1
    final = given.discard or attempts >= max_attempts
    following = EpisodeState.DISCARDED if final else EpisodeState.REGISTERED
    if reason.startswith(ON_PURPOSE) and not final:  # says nothing of the episode; what it has failed with does
        reason = _REASON.row(connection, {"episode_id": episode_id})[0] or reason
    changed = {"reason": reason, "ended_at": now if final else None, "attempts": attempts}
    set_state(connection, episode, following, changed)
    return following


def live(connection: Connection) -> list[EpisodeRecord]:
    """Return all claimed episodes, which get new leases at a restart."""
    rows = connection.execute(select(episodes).where(episodes.c.state == EpisodeState.CLAIMED.value))
    return [episode_of(row) for row in rows]


def set_state(
    connection: Connection, episode: EpisodeRecord, following: EpisodeState, values: Mapping[str, Any]
) -> None:
    """Set an episode's state and other columns. Only `_COMPLETE` and `claiming.take` write a state without it."""
    check_transition(f"episode {episode.episode_id}", episode.state, following)
    known = {"b_id": episode.episode_id, "b_fence": episode.fence, "b_state": following.value}
    _changing(tuple(values)).change(connection, known | {f"v_{name}": value for name, value in values.items()})


@cache
def _changing(columns: tuple[str, ...]) -> Prepared:
    """Return the statement that sets an episode's state and these columns, compiled once."""
    return Prepared(
        sa.update(episodes)
        .where(episodes.c.episode_id == bindparam("b_id"), episodes.c.fence == bindparam("b_fence"))
        .values(state=bindparam("b_state"), **{name: bindparam(f"v_{name}") for name in columns})
    )
