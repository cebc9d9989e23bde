"""The tables of a run store as columns: episodes, calls and sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, Select, select

from palestra.store.browsing import EpisodeSummary
from palestra.store.codec import fork_of, unpack
from palestra.store.run_store import UNREADABLE
from palestra.store.search import DamagedEpisode, readable_summaries
from palestra.store.tables import chats, episodes, groups, trained_tokens
from palestra.store.trained_tokens import TrainedCall, trained_call
from palestra.types.calls import PolicyVersion

DAMAGED = (*UNREADABLE, KeyError, IndexError, TypeError)
PIECE = 500  # episodes whose calls are summed up together


def episode_columns(connection: Connection, wanted: Select[Any]) -> dict[str, list[Any]]:
    """Return a row for each episode; of a damaged one, what can be read.

    Args:
        connection: from `browse`.
        wanted: rows of `episodes_where`.
    """
    found: dict[str, list[Any]] = {name: [] for name in (*EPISODE_COLUMNS, "damaged")}
    for rows in _pieces(connection, wanted):
        for row, one in zip(rows, readable_summaries(connection, rows), strict=True):
            damaged = one.why if isinstance(one, DamagedEpisode) else None
            values = _episode(one) if isinstance(one, EpisodeSummary) else {"episode_id": one.episode_id}
            for name in EPISODE_COLUMNS:
                found[name].append(values.get(name))
            found["step"][-1] = row.step
            found["damaged"].append(damaged)
    return found


EPISODE_COLUMNS = (
    *("episode_id", "kind", "step", "group_index", "sample_index", "task_id", "state", "reward", "rewards", "calls"),
    *("tokens", "attempts", "forks", "termination", "reason", "metadata"),
)


def _episode(one: EpisodeSummary) -> dict[str, Any]:
    """Return an episode's values by column; those without a fixed shape as JSON."""
    return {
        "episode_id": one.episode_id,
        "kind": one.kind,
        "group_index": one.group_index,
        "sample_index": one.sample_index,
        "task_id": one.task_id,
        "state": one.state,
        "reward": one.reward,
        "rewards": None if one.rewards is None else orjson.dumps(one.rewards).decode(),
        "calls": one.calls,
        "tokens": one.completion_tokens,
        "attempts": one.attempts,
        "forks": sum(one.forks.values()),
        "termination": one.termination,
        "reason": one.reason,
        "metadata": orjson.dumps(one.metadata).decode(),
    }


def episodes_where(kind: str | None, state: str | None, step: int | None, episode_id: str | None = None) -> Select[Any]:
    """Return the statement for episodes with the step of their group, in canonical order; None allows any.

    Args:
        kind: of the episodes.
        state: of the episodes.
        step: the step that trains them or, of validation, before which they are scored.
        episode_id: of the only episode.
    """
    of_group = (groups.c.kind == episodes.c.kind) & (groups.c.group_index == episodes.c.group_index)
    statement = select(episodes, groups.c.step).outerjoin(groups, of_group)
    columns = {episodes.c.kind: kind, episodes.c.state: state, groups.c.step: step, episodes.c.episode_id: episode_id}
    for column, value in columns.items():
        if value is not None:
            statement = statement.where(column == value)
    return statement.order_by(episodes.c.kind, episodes.c.group_index, episodes.c.sample_index)


def _pieces(connection: Connection, wanted: Select[Any]) -> Iterator[Sequence[Any]]:
    result = connection.execution_options(yield_per=PIECE).execute(wanted)
    yield from result.partitions(PIECE)


CALL_COLUMNS = (
    *("episode_id", "call", "time_step", "agent", "policy", "parent", "prompt_tokens", "tokens", "finish_reason"),
    *("fork", "temperature", "max_tokens", "seed", "started_at", "seconds", "reply", "damaged"),
)


def call_columns(connection: Connection, wanted: Select[Any]) -> dict[str, list[Any]]:
    """Return a row for each call of the last lease of episodes; of a damaged one, what can be read.

    Args:
        connection: from `browse`.
        wanted: rows of `episodes_where`.
    """
    found: dict[str, list[Any]] = {name: [] for name in CALL_COLUMNS}
    for row in connection.execute(_calls_of(wanted)):
        values: dict[str, Any] = {"episode_id": row.episode_id, "call": row.idx}
        try:
            tokens = sum(count for _, _, count in orjson.loads(row.versions))
            prompt = row.shared + len(unpack(row.prompt_tail, "i4"))
            values |= {
                "time_step": row.time_step,
                "agent": row.agent,
                "policy": row.policy,
                "parent": row.parent,
                "prompt_tokens": prompt,
                "tokens": tokens,
                "finish_reason": row.finish_reason,
                "fork": None if row.fork is None else fork_of(row.fork).reason.value,
                "temperature": row.temperature,
                "max_tokens": row.max_tokens,
                "seed": row.seed,
                "started_at": row.started_at,
                "seconds": row.finished_at - row.started_at,
                "reply": row.reply,
            }
        except DAMAGED as error:
            values["damaged"] = f"{type(error).__name__}: {error}"
        for name in CALL_COLUMNS:
            found[name].append(values.get(name))
    return found


def token_columns(connection: Connection, wanted: Select[Any]) -> dict[str, Any]:
    """Return a row for each sampled token of the last lease of episodes; damaged calls are left out.

    Args:
        connection: from `browse`.
        wanted: rows of `episodes_where`.
    """
    names: dict[str, list[Any]] = {name: [] for name in ("episode_id", "policy", "agent", "version")}
    calls, places, ids, logprobs, trained = list[Any](), list[Any](), list[Any](), list[Any](), list[Any]()
    recorded = _trained_of(connection, wanted)
    for row in connection.execute(_calls_of(wanted)):
        try:
            sampled, found = unpack(row.completion, "i4"), unpack(row.logprobs, "f4")
            versions = [str(PolicyVersion(i, n)) for i, n, count in orjson.loads(row.versions) for _ in range(count)]
            if not len(sampled) == len(found) == len(versions):
                continue
        except DAMAGED:
            continue
        count = len(sampled)
        names["version"] += versions
        for name in ("episode_id", "policy", "agent"):
            names[name] += [getattr(row, name)] * count
        calls.append(np.full(count, row.idx, np.int32))
        places.append(np.arange(count, dtype=np.int32))
        ids.append(sampled)
        logprobs.append(found)
        trained.append(np.full(count, np.nan, np.float32))
        if (call := recorded.get((row.episode_id, row.idx))) is not None:
            first = call.start - row.shared - len(unpack(row.prompt_tail, "i4"))
            trained[-1][first : first + len(call.logprobs)] = call.logprobs
    return {
        "episode_id": names["episode_id"],
        "call": _joined(calls, np.int32),
        "place": _joined(places, np.int32),
        "token": _joined(ids, np.int32),
        "logprob": _joined(logprobs, np.float32),
        "trained_logprob": _joined(trained, np.float32),
        "version": names["version"],
        "policy": names["policy"],
        "agent": names["agent"],
    }


def _trained_of(connection: Connection, wanted: Select[Any]) -> dict[tuple[str, int], TrainedCall]:
    """Return what is recorded of the calls of episodes when they were trained, by episode and call.

    Args:
        connection: from `browse`.
        wanted: rows of `episodes_where`.
    """
    of = wanted.order_by(None).with_only_columns(episodes.c.episode_id).subquery()
    rows = connection.execute(select(trained_tokens).join(of, trained_tokens.c.episode_id == of.c.episode_id))
    found = (trained_call(row) for row in rows.all())
    return {(call.episode_id, call.index): call for call in found}


def _joined(parts: list[Any], kind: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, kind)


def _calls_of(wanted: Select[Any]) -> Select[Any]:
    """Return the statement for the calls of the last lease of episodes, in order."""
    of = wanted.order_by(None).with_only_columns(episodes.c.episode_id, episodes.c.fence).subquery()
    same = (chats.c.episode_id == of.c.episode_id) & (chats.c.fence == of.c.fence)
    return select(chats).join(of, same).order_by(chats.c.episode_id, chats.c.idx)
