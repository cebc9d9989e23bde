"""The calls of episodes, each stored without what its parent has, and the logprobs of their tokens when trained."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy import BindParameter, Connection, bindparam, null, select

from palestra.database import Database
from palestra.database.sqlite import Prepared, pieces
from palestra.store.codec import chat_of, chat_row, pack_array, unpack
from palestra.store.lifecycle import episode_by_id, held
from palestra.store.tables import chats, episodes, trained_tokens
from palestra.types.calls import Chat, Floats, StepTimes
from palestra.types.messages import ChatMessage
from palestra.types.records import EpisodeRecord, TimeStep, Trajectory
from palestra.types.states import EpisodeState

READ_AT_ONCE = 32  # trajectories

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
_IN_LEASE = [chats.c[name] == value for name, value in _LEASE.items()]
_OF_LEASE = Prepared(select(chats).where(*_IN_LEASE).order_by(chats.c.idx))
_SHORT = [column for column in chats.c if column is not chats.c.top_logprobs]
_WITHOUT_TOP = Prepared(select(*_SHORT, null().label("top_logprobs")).where(*_IN_LEASE).order_by(chats.c.idx))
_SPANS = Prepared(select(chats.c.versions).where(*_IN_LEASE))
_LAST = Prepared(
    select(chats.c.reply).where(*_IN_LEASE, ~chats.c.agent.contains("/")).order_by(chats.c.idx.desc()).limit(1)
)


class CallSummary(NamedTuple):
    """The calls of a lease: their number, the tokens of their replies, and the text of the main agent's last reply."""

    calls: int
    sampled_tokens: int
    answer: str | None


class Calls:
    """Records and reads the calls of a job's episodes.

    Sessions append calls; the learner and commands read trajectories.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    def append(self, chat: Chat) -> Future[None]:
        """Record a call; the future resolves when it is on disk, even if the client has disconnected.

        The future raises EpisodeLeaseExpired or EpisodeEnded if the call's lease is over.
        """
        return self._db.submit(partial(insert_call, chat), "chat_commit")

    async def summary(self, episode_id: str, fence: int) -> CallSummary:
        """Return what an episode's calls under one of its leases come to, so far."""
        key = {"episode_id": episode_id, "fence": fence}

        def read(connection: Connection) -> CallSummary:
            spans = [orjson.loads(row.versions) for row in _SPANS.rows(connection, key)]
            last = next(iter(_LAST.rows(connection, key)), None)
            answer = None if last is None else ChatMessage.model_validate_json(last.reply).text
            return CallSummary(len(spans), sum(tokens for one in spans for *_, tokens in one), answer)

        return await self._db.read(read)

    async def of_lease(self, episode_id: str, fence: int) -> tuple[EpisodeRecord, tuple[Chat, ...]]:
        """Return an episode and the calls under one of its leases, in one consistent read."""

        def query(connection: Connection) -> tuple[EpisodeRecord, tuple[Chat, ...]]:
            return episode_by_id(connection, episode_id), _of_lease(connection, episode_id, fence)

        return await self._db.read(query)

    async def trajectories(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        """Return episodes with the calls of their last lease, in the order of `episode_ids`.

        The calls are without top logprobs: training needs none, and they may take most of the memory of a step.
        """

        def read(connection: Connection, piece: Sequence[str]) -> list[Trajectory]:
            return [read_trajectory(connection, name, _WITHOUT_TOP) for name in piece]

        # In pieces, because other tasks wait for the connection.
        found = [await self._db.read(partial(read, piece=piece)) for piece in pieces(episode_ids, READ_AT_ONCE)]
        return [trajectory for piece in found for trajectory in piece]


def insert_call(chat: Chat, connection: Connection) -> None:
    """Record a call in the caller's transaction; errors as of `Calls.append`."""
    if _INSERT_IF_HELD.change(connection, chat_row(chat)) == 0:
        held(connection, chat.episode_id, chat.fence)  # raises the reason
        raise AssertionError(f"a call of episode {chat.episode_id}, which is held, was not recorded")


def read_trajectory(connection: Connection, episode_id: str, calls: Prepared = _OF_LEASE) -> Trajectory:
    """Return an episode with the calls of its last lease."""
    episode = episode_by_id(connection, episode_id)
    found = _of_lease(connection, episode_id, episode.fence, calls)
    return Trajectory(episode=episode, steps=time_steps(episode, found))


def _of_lease(connection: Connection, episode_id: str, fence: int, calls: Prepared = _OF_LEASE) -> tuple[Chat, ...]:
    """Return the calls that were recorded under one lease, in order of index, so that parents come before children."""
    found: dict[int, Chat] = {}
    for row in calls.rows(connection, {"episode_id": episode_id, "fence": fence}):
        found[row.idx] = chat_of(row, found)
    return tuple(found.values())


def time_steps(episode: EpisodeRecord, calls: Sequence[Chat]) -> tuple[TimeStep, ...]:
    """Return the TimeSteps of an episode that have calls, in order. `episode` has their rewards and times, if these are
    known; `calls` are those of one lease, in any order.
    """
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
            terminated=over and index == last and not episode.truncated,
            truncated=over and index == last and episode.truncated,
        )
        for index, group in sorted(by_step.items())
    )


def _acted_at(times: Sequence[StepTimes], calls: Sequence[Chat]) -> float:
    """Return when the action of a TimeStep was given; if that is not recorded, when its last call returned."""
    acted = times[0].acted_at if times else None
    return max(chat.finished_at for chat in calls) if acted is None else acted


KEPT_STEPS = 100  # the newest ones; a token takes about 4 bytes, and the page is asked about what happens now
_PUT = Prepared(
    trained_tokens.insert().prefix_with("OR REPLACE").values({c.name: bindparam(c.name) for c in trained_tokens.c})
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedCall:
    """The trained tokens of one call.

    Attributes:
        start: position of the first of `logprobs`, counted from the start of the prompt.
        logprobs: float32 [C] under the weights of the token's first gradient; NaN where the token is not trained.
    """

    episode_id: str
    index: int
    start: int
    logprobs: Floats


class TrainedTokens:
    """Records the logprobs of trained tokens for the newest steps."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def record(self, step: int, calls: Sequence[TrainedCall]) -> None:
        """Record calls of a step, replacing those of an earlier attempt at the step."""
        early = sa.delete(trained_tokens).where(trained_tokens.c.step <= step - KEPT_STEPS)
        for piece in pieces(calls):

            def put(connection: Connection, piece: Sequence[TrainedCall] = piece) -> None:
                for one in piece:
                    values = {"step": step, "episode_id": one.episode_id, "idx": one.index, "start": one.start}
                    _PUT.change(connection, values | {"logprobs": pack_array(one.logprobs, "f4")})
                connection.execute(early)

            await self._db.write(put)


def read_trained(connection: Connection, step: int, episode_id: str) -> dict[int, TrainedCall]:
    """Return an episode's calls that a step has trained, by index; empty if they are not recorded."""
    wanted = select(trained_tokens).where(trained_tokens.c.step == step, trained_tokens.c.episode_id == episode_id)
    return {row.idx: trained_call(row) for row in connection.execute(wanted)}


def trained_call(row: Any) -> TrainedCall:
    """Return the call of a row of `trained_tokens`. Raises zlib.error if the row is damaged."""
    values = unpack(row.logprobs, "f4")
    return TrainedCall(episode_id=row.episode_id, index=row.idx, start=row.start, logprobs=values)
