"""Tasks, manifests, metrics, events and small facts of a run, as operations on a connection."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from palestra.errors import Conflict
from palestra.ledger.codec import to_json
from palestra.ledger.tables import events, manifests, meta, metric_rows, task_chunks, tasks
from palestra.schemas.records import BatchManifest, Event, PolicyVersion, Task

UNFINISHED = "unfinished_metrics"  # key of the row of a step that was trained and not yet evaluated


def push_tasks(connection: Connection, split: str, new: Sequence[Task], chunk_id: str) -> int:
    """Append tasks; returns the size of the split.

    Raises:
        Conflict: the chunk, or a task id, was used before for other data; or no more tasks are taken.
    """
    digest = hashlib.sha256(to_json([[t.task_id, t.data] for t in new]).encode()).hexdigest()
    known = connection.execute(
        select(task_chunks.c.digest).where(task_chunks.c.split == split, task_chunks.c.chunk_id == chunk_id)
    ).scalar()
    total = connection.execute(select(func.count()).where(tasks.c.split == split)).scalar_one()
    if known == digest:
        return int(total)
    if known is not None:
        raise Conflict(f"chunk {chunk_id!r} was pushed before with other tasks")
    if get_meta(connection, "tasks_sealed"):
        raise Conflict("this job takes no more tasks: a push with final=true ended them, or they came from a file")
    taken = {
        row.task_id: row.data
        for start in range(0, len(new), 500)
        for row in connection.execute(
            select(tasks.c.task_id, tasks.c.data).where(
                tasks.c.split == split, tasks.c.task_id.in_([t.task_id for t in new[start : start + 500]])
            )
        )
    }
    rows: list[dict[str, Any]] = []
    for task in new:
        data = to_json(task.data)
        if task.task_id in taken:
            if taken[task.task_id] != data:
                raise Conflict(f"task {task.task_id!r} was given before with other data")
            continue
        taken[task.task_id] = data
        rows.append({"split": split, "position": total + len(rows), "task_id": task.task_id, "data": data})
    if rows:
        connection.execute(tasks.insert(), rows)
    connection.execute(task_chunks.insert(), {"split": split, "chunk_id": chunk_id, "digest": digest})
    return int(total) + len(rows)


def read_tasks(connection: Connection, split: str) -> list[Task]:
    """All tasks of a split, in the order in which they came."""
    rows = connection.execute(select(tasks).where(tasks.c.split == split).order_by(tasks.c.position))
    return [Task(task_id=row.task_id, data=orjson.loads(row.data)) for row in rows]


def commit_manifest(connection: Connection, manifest: BatchManifest) -> None:
    """Fix what a step trains on; the same again is a no-op.

    Raises:
        Conflict: the step has another manifest.
    """
    known = read_manifest(connection, manifest.step)
    if known == manifest:
        return
    if known is not None:
        raise Conflict(f"step {manifest.step} has a manifest with other episodes")
    connection.execute(
        manifests.insert(),
        {
            "step": manifest.step,
            "incarnation": manifest.version.incarnation,
            "n": manifest.version.n,
            "episode_ids": to_json(manifest.episode_ids),
            "seed": str(manifest.seed),
            "config_digest": manifest.config_digest,
        },
    )


def read_manifest(connection: Connection, step: int) -> BatchManifest | None:
    """What a step trains on; None until it is fixed."""
    row = connection.execute(select(manifests).where(manifests.c.step == step)).first()
    if row is None:
        return None
    return BatchManifest(
        step=row.step,
        version=PolicyVersion(row.incarnation, row.n),
        episode_ids=tuple(orjson.loads(row.episode_ids)),
        seed=int(row.seed),
        config_digest=row.config_digest,
    )


def put_metrics(connection: Connection, step: int, data: Mapping[str, float]) -> None:
    """Write the finished row of a step, in the place of what is known of it."""
    connection.execute(sa.delete(metric_rows).where(metric_rows.c.step == step))
    connection.execute(metric_rows.insert(), {"step": step, "data": to_json(dict(data))})
    if _unfinished_step(connection) == step:
        connection.execute(sa.delete(meta).where(meta.c.key == UNFINISHED))


def put_unfinished_metrics(connection: Connection, data: Mapping[str, float]) -> None:
    """Keep the row of a trained step that still waits for its evaluation; it is none of the rows until then."""
    set_meta(connection, UNFINISHED, to_json(dict(data)))


def restore_metrics(connection: Connection, step: int) -> dict[str, float] | None:
    """Drop the rows of steps after `step`, which will be trained again; return that of `step` if it is unfinished.

    A run of an earlier version kept an unfinished row among the others, without `wall_seconds`; such a row is taken
    out, so that it gets the evaluation that it lacks.
    """
    connection.execute(sa.delete(metric_rows).where(metric_rows.c.step > step))
    rows = {int(row["step"]): row for row in read_metrics(connection)}
    if step in rows and "wall_seconds" not in rows[step]:
        put_unfinished_metrics(connection, rows[step])
        connection.execute(sa.delete(metric_rows).where(metric_rows.c.step == step))
    if _unfinished_step(connection) != step:
        return None
    unfinished: dict[str, float] = orjson.loads(get_meta(connection, UNFINISHED) or "")
    return unfinished


def _unfinished_step(connection: Connection) -> int | None:
    found = get_meta(connection, UNFINISHED)
    return None if found is None else int(orjson.loads(found)["step"])


def read_metrics(connection: Connection) -> list[dict[str, float]]:
    """Return all finished rows, by step."""
    rows = connection.execute(select(metric_rows.c.data).order_by(metric_rows.c.step)).scalars()
    return [orjson.loads(row) for row in rows]


def add_event(connection: Connection, kind: str, data: Mapping[str, Any], now: float) -> Event:
    """Append an event."""
    result = connection.execute(events.insert(), {"at": now, "kind": kind, "data": to_json(dict(data))})
    key = result.inserted_primary_key
    assert key is not None
    return Event(event_id=key[0], at=now, kind=kind, data=dict(data))


def read_events(connection: Connection, after: int, limit: int) -> list[Event]:
    """Events with a larger id, oldest first."""
    rows = connection.execute(select(events).where(events.c.event_id > after).order_by(events.c.event_id).limit(limit))
    return [Event(event_id=r.event_id, at=r.at, kind=r.kind, data=orjson.loads(r.data)) for r in rows]


def get_meta(connection: Connection, key: str) -> str | None:
    """A small fact; None where it was never set."""
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar()


def set_meta(connection: Connection, key: str, value: str) -> None:
    """Set a small fact."""
    connection.execute(sa.delete(meta).where(meta.c.key == key))
    connection.execute(meta.insert(), {"key": key, "value": value})
