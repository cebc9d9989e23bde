"""Read a run store from another process, without writing to it."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Column, Connection, Engine, NullPool, bindparam, select, tuple_

from palestra.database.sqlite import MOST_VALUES, open_engine, sqlite_connection
from palestra.errors import PalestraError, StoreError
from palestra.store.calls import read_trajectory
from palestra.store.codec import fork_of
from palestra.store.counting import KINDS
from palestra.store.run_log import event_of
from palestra.store.run_store import store_error
from palestra.store.tables import OF_LAST_LEASE, SCHEMA, chats, episodes, events, groups, manifests
from palestra.store.verdicts import verdicts_of
from palestra.types.records import REFUSED_CALLS, RunEvent, Trajectory, Verdict
from palestra.types.states import EpisodeState, GroupState
from palestra.types.summaries import EpisodeSummary, shown_metadata

PIECE = 500  # rows of episodes that are in memory at the same time where all are read
STEPS_BETWEEN = 100_000  # of SQLite's machine between two looks at the time, about a millisecond


@contextmanager
def browse(path: Path, seconds: float | None = None) -> Iterator[Connection]:
    """Open a read-only connection to a run store, without disturbing a job that writes to it. `seconds`: time limit of
    the connection's queries; None: unlimited.
    """
    # SQLite would wait for the other end of a pipe, and holds the interpreter's lock in some of its calls.
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a file")
    until = math.inf if seconds is None else time.monotonic() + seconds
    try:
        with _connected(path, until) as connection:
            yield connection
    except StoreError as error:
        if seconds is None or time.monotonic() < until:
            raise
        raise StoreError(f"reading {path} took longer than {seconds:g} s, and was ended") from error


@contextmanager
def _connected(path: Path, until: float) -> Iterator[Connection]:
    """Open a connection whose queries end at a time of the monotonic clock."""
    try:
        with _engine(path.absolute()).begin() as connection:
            if until < math.inf:
                sqlite_connection(connection).set_progress_handler(lambda: time.monotonic() > until, STEPS_BETWEEN)
            if (version := SCHEMA.read_version(connection)) == 0:
                tables = connection.exec_driver_sql("SELECT count(*) FROM main.sqlite_master").scalar_one()
                raise StoreError(f"{path} is empty" if tables == 0 else f"{path} is not the store of a run")
            SCHEMA.check(version, path)
            yield connection
    except PalestraError:
        raise
    except Exception as error:
        raise store_error(path, error) from error


@lru_cache(maxsize=64)
def _engine(path: Path) -> Engine:
    """Return an engine that opens a connection for each use, cached with its statements, which are slow to compile."""
    return open_engine(path, "FULL", read_only=True, pool=NullPool)


def newest_event_number(path: Path, seconds: float) -> int | None:
    """Return the number of the newest event, 0 without events; None: the store cannot be read, and `browse` raises the
    reason.

    Made for polling: it takes a tenth of the time of `browse`.
    """
    until = time.monotonic() + seconds
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until, STEPS_BETWEEN)
            (found,) = connection.execute("SELECT max(event_id) FROM events").fetchone()
    except sqlite3.Error:
        return None
    return found if isinstance(found, int) else 0


def called_by(connection: Connection, policy: str) -> set[str]:
    """Return the ids of the episodes in which a policy has sampled."""
    found = select(chats.c.episode_id).where(chats.c.policy == policy).distinct()
    return set(connection.execute(found).scalars())


def list_episodes(connection: Connection, kind: str | None, state: str | None, limit: int) -> list[EpisodeSummary]:
    """Return the most recently claimed episodes, in canonical order."""
    rows = newest_rows(connection, kind, state, limit)
    calls = calls_of(connection, [row.episode_id for row in rows])
    return [summary(row, calls.get(row.episode_id, [])) for row in rows]


def trained_steps(connection: Connection, rows: Sequence[Any]) -> dict[str, int]:
    """Return the step whose batch has each episode, by its id; one that is in no batch is left out."""
    wanted, found = {row.episode_id for row in rows}, dict[str, int]()
    step_of = select(groups.c.step).where(groups.c.kind == "train", groups.c.group_index == bindparam("group"))
    members = {row.group_index for row in rows if row.kind == "train"}
    # One by one: for a list of groups SQLite would read an index of all.
    for step in {connection.execute(step_of, {"group": group}).scalar() for group in members}:
        names = connection.execute(select(manifests.c.episode_ids).where(manifests.c.step == step)).scalar() or "[]"
        with suppress(ValueError, TypeError):  # a damaged batch says nothing of any episode
            found |= dict.fromkeys(wanted.intersection(orjson.loads(names)), step)
    return found


def last_state(connection: Connection) -> Any | None:
    """Return kind and data of the newest event about the run's state, or None."""
    wanted = select(events.c.kind, events.c.data).where(events.c.kind.in_(("running", "completed", "failed")))
    return connection.execute(wanted.order_by(events.c.event_id.desc()).limit(1)).first()


def newest_rows(connection: Connection, kind: str | None, state: str | None, limit: int) -> list[Any]:
    """Return the rows of `episodes` that `list_episodes` makes summaries of; see there."""
    kinds = KINDS if kind is None else (kind,)
    found = last_of_states(connection, kinds, tuple(EpisodeState) if state is None else (state,), limit, *episodes.c)
    newest = nlargest(limit, found, key=lambda row: (row.claimed_at or 0.0, row.group_index, row.sample_index))
    return sorted(newest, key=lambda row: (row.kind, row.group_index, row.sample_index))


def last_of_states(
    connection: Connection, kinds: Iterable[str], states: Iterable[str], limit: int, *columns: Column[Any]
) -> list[Any]:
    """Return columns of the episodes that are last in the canonical order, at most `limit` of each kind and state.

    Episodes are claimed in this order, so those that were claimed or that ended last are among them; an index has it.
    """
    wanted = select(*columns).order_by(episodes.c.group_index.desc(), episodes.c.sample_index.desc()).limit(limit)
    pairs = ((kind, state) for kind in kinds for state in states)
    of_pairs = (wanted.where(episodes.c.state == state, episodes.c.kind == kind) for kind, state in pairs)
    return [row for one in of_pairs for row in connection.execute(one)]


def pieces_of_rows(connection: Connection, kind: str | None, state: str | None) -> Iterator[list[Any]]:
    """Yield all rows of `episodes` in canonical order, in pieces; see `list_episodes`."""
    place = (episodes.c.kind, episodes.c.group_index, episodes.c.sample_index)
    wanted = select(episodes).order_by(*place).limit(PIECE)
    for column, value in ((episodes.c.kind, kind), (episodes.c.state, state)):
        wanted = wanted if value is None else wanted.where(column == value)
    rows = list(connection.execute(wanted))
    while rows:
        yield rows
        last = (rows[-1].kind, rows[-1].group_index, rows[-1].sample_index)
        rows = list(connection.execute(wanted.where(tuple_(*place) > last)))


def read_episodes(
    run_dir: Path | str, kind: str | None = None, state: str | None = "completed"
) -> list[EpisodeSummary]:
    """Return the episodes that a run recorded, in canonical order. The run may still be running.

    Args:
        run_dir: the run's folder, such as `TrainResult.run_dir`.
        kind: `train`, `validation` or `adhoc`; None: all.
        state: such as `completed`; None: all.

    Raises:
        StoreError: there is no run, or it cannot be read.
    """
    with browse(Path(run_dir) / "run.db") as connection:
        return list_episodes(connection, kind, state, sys.maxsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeView:
    """One episode with all of its calls, for display.

    Attributes:
        group_state: None: it is in no group that is trained or scored.
        failed_reason: of its last failed attempt, if any.
        verdicts: of the job's judge on its last attempt.
    """

    trajectory: Trajectory
    step: int | None
    group_state: GroupState | None
    failed_reason: str | None
    verdicts: tuple[Verdict, ...] = ()


def read_episode(connection: Connection, episode_id: str, known: Trajectory | None = None) -> EpisodeView:
    """Return an episode with its calls, and the step that trained on it. `known`: its calls, if the caller has them."""
    found = read_trajectory(connection, episode_id) if known is None else known
    own = (groups.c.kind == found.episode.kind, groups.c.group_index == found.episode.group_index)
    state = connection.execute(select(groups.c.state).where(*own)).scalar()
    # A group is trained in its own step, or not at all.
    batch = manifests.c.step == select(groups.c.step).where(*own).scalar_subquery()
    in_batch = manifests.c.episode_ids.contains(f'"{episode_id}"')
    step = connection.execute(select(manifests.c.step).where(batch, in_batch)).scalar()
    reason = connection.execute(select(episodes.c.reason).where(episodes.c.episode_id == episode_id)).scalar()
    return EpisodeView(
        trajectory=found,
        step=step,
        group_state=None if state is None else GroupState(state),
        failed_reason=reason,
        verdicts=tuple(verdicts_of(connection, found.episode)),
    )


def episode_events(connection: Connection, view: EpisodeView) -> list[RunEvent]:
    """Return the events that say why an episode was left out of a batch."""
    episode = view.trajectory.episode
    own = (groups.c.kind == episode.kind, groups.c.group_index == episode.group_index)
    wanted = select(events).where(
        events.c.step == select(groups.c.step).where(*own).scalar_subquery(),
        events.c.kind.in_(("episode_untrainable", "episode_stale")),
        events.c.data.contains(f'"{episode.episode_id}"'),
    )
    return [event_of(row) for row in connection.execute(wanted.order_by(events.c.event_id))]


def calls_of(connection: Connection, episode_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Return (versions, fork, finish_reason) of each call of the episodes' last leases, by episode."""
    found: dict[str, list[Any]] = {}
    for start in range(0, len(episode_ids), MOST_VALUES):
        wanted = (
            select(chats.c.episode_id, chats.c.versions, chats.c.fork, chats.c.finish_reason)
            .join(episodes, OF_LAST_LEASE)
            .where(chats.c.episode_id.in_(episode_ids[start : start + MOST_VALUES]))
            .order_by(chats.c.episode_id, chats.c.idx)
        )
        for call in connection.execute(wanted):
            found.setdefault(call.episode_id, []).append(call)
    return found


def summary(row: Any, calls: Sequence[Any]) -> EpisodeSummary:
    """Return the summary of a row of `episodes`. `calls`: rows with `versions`, `fork` and `finish_reason` of its
    calls.
    """
    # The lengths of the version spans add up to the completion's, so no compressed tokens have to be read.
    lengths = [sum(count for _, _, count in orjson.loads(call.versions)) for call in calls]
    facts = {} if row.facts is None else _object(row.facts)
    forks = Counter(fork_of(call.fork).reason for call in calls if call.fork is not None)
    rewards = None if row.rewards is None or row.state != "completed" else _object(row.rewards, float, int)
    reason, refused = None if row.state == "completed" else row.reason, facts.get(REFUSED_CALLS)
    termination = facts.get("termination")
    if not isinstance(termination, str):
        termination = None if reason is None else reason.partition(":")[0]
    metadata = facts | _object(row.metadata)
    return EpisodeSummary(
        episode_id=row.episode_id,
        kind=row.kind,
        group_index=row.group_index,
        sample_index=row.sample_index,
        task_id=row.task_id,
        state=row.state,
        reward=None if rewards is None else float(sum(rewards.values())),
        rewards=rewards,
        calls=len(lengths),
        tokens=sum(lengths),
        cut=sum(call.finish_reason == "length" for call in calls),
        attempts=row.attempts,
        forks={reason.value: count for reason, count in forks.items() if reason.is_drift},
        refused={name: n for name, n in refused.items() if type(n) is int} if isinstance(refused, dict) else {},
        termination=termination,
        reason=reason,
        earlier_reason=row.reason if row.state == "completed" else None,
        metadata=shown_metadata(metadata),
        whole_metadata=metadata,
        worker=row.worker_id if row.state == "claimed" else None,
        claimed_at=row.claimed_at,
        ended_at=row.ended_at,
        players={} if row.players is None else _object(row.players, str),
    )


def _object(text: str, *kinds: type) -> dict[str, Any]:
    """Return the JSON object in a text."""
    found = orjson.loads(text)
    if not isinstance(found, dict) or not (kinds == () or all(isinstance(value, kinds) for value in found.values())):
        raise ValueError(f"{text[:80]!r} is not what a record has")
    return found
