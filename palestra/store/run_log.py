"""The history of a job, step by step: manifests, metrics, events, and small facts of the run."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from pydantic import TypeAdapter
from sqlalchemy import Connection, select

from palestra.database import Database, to_json
from palestra.errors import Conflict
from palestra.store.tables import events, manifests, meta, metric_rows
from palestra.types.calls import PolicyVersion
from palestra.types.clock import Clock
from palestra.types.records import BatchManifest, RunEvent

NUMERICS = "numerics"  # fact: what computes the run, JSON; see `palestra.models.numerics`
EXCERPT = 400  # characters of a damaged record that are shown
_EVENT = TypeAdapter(RunEvent)
UNFINISHED = "unfinished_metrics"  # fact that holds the row of a step that is trained but not evaluated


class RunLog:
    """The history of a run. Methods return when their changes are on disk."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db, self._clock = db, clock

    async def commit_manifest(self, manifest: BatchManifest) -> None:
        """Fix the batch of a step; repeating the same manifest changes nothing. Raises Conflict if the step has another
        manifest.
        """

        def commit(connection: Connection) -> None:
            known = read_manifest(connection, manifest.step)
            if known == manifest:
                return
            if known is not None:
                raise Conflict(f"step {manifest.step} has a manifest with other episodes")
            connection.execute(
                manifests.insert(),
                {
                    "step": manifest.step,
                    "versions": to_json({name: [*version] for name, version in manifest.versions.items()}),
                    "episode_ids": to_json(manifest.episode_ids),
                    "seed": str(manifest.seed),
                    "config_digest": manifest.config_digest,
                },
            )

        await self._db.write(commit, "manifest_commit")

    async def manifest(self, step: int) -> BatchManifest | None:
        """Return the batch of a step, or None until it is fixed."""
        return await self._db.read(lambda connection: read_manifest(connection, step))

    async def put_metrics(self, step: int, data: Mapping[str, float]) -> None:
        """Write the finished row of a step, replacing an earlier one."""

        def put(connection: Connection) -> None:
            connection.execute(sa.delete(metric_rows).where(metric_rows.c.step == step))
            connection.execute(metric_rows.insert(), {"step": step, "data": to_json(dict(data))})
            if _unfinished_step(connection) == step:
                connection.execute(sa.delete(meta).where(meta.c.key == UNFINISHED))

        await self._db.write(put)

    async def put_unfinished_metrics(self, data: Mapping[str, float]) -> None:
        """Store the row of a trained step, hidden from `metrics`, until `put_metrics` writes it with the step's
        evaluation.
        """
        await self._db.write(lambda connection: set_fact(connection, UNFINISHED, to_json(dict(data))))

    async def restore_metrics(self, step: int) -> dict[str, float] | None:
        """Drop the rows after `step`, which will be trained again; return the row of `step` if it waits for its
        evaluation.
        """

        def restore(connection: Connection) -> dict[str, float] | None:
            connection.execute(sa.delete(metric_rows).where(metric_rows.c.step > step))
            if _unfinished_step(connection) != step:
                return None
            unfinished: dict[str, float] = orjson.loads(read_fact(connection, UNFINISHED) or "")
            return unfinished

        return await self._db.write(restore)

    async def metrics(self) -> list[dict[str, float]]:
        """Return all finished rows, in order of steps."""
        return await self._db.read(lambda connection: read_metrics(connection))

    async def metrics_of(self, step: int) -> dict[str, float]:
        """Return the finished row of a step; empty: there is none, or it is damaged."""
        rows = (await self._db.read(lambda connection: readable_row(connection, step))).rows
        return rows[0] if rows else {}

    async def last_manifest(self) -> int:
        """Return the last step with a fixed batch, or 0."""
        wanted = select(sa.func.coalesce(sa.func.max(manifests.c.step), 0))
        return await self._db.read(lambda connection: int(connection.execute(wanted).scalar_one()))

    async def add_event(self, kind: str, data: Mapping[str, Any]) -> RunEvent:
        """Record an event for people and programs that follow the job, with the present time."""
        now = self._clock.now()
        return await self._db.write(lambda connection: insert_event(connection, kind, data, now))

    async def events(self, after: int, limit: int = 500) -> list[RunEvent]:
        """Return up to `limit` events with a larger id than `after`, oldest first."""
        return await self._db.read(lambda connection: read_events(connection, after, limit))

    async def fact(self, key: str) -> str | None:
        """Return a small fact of the run, such as its incarnation, or None."""
        return await self._db.read(lambda connection: read_fact(connection, key))

    async def set_fact(self, key: str, value: str) -> None:
        """Store a small fact of the run, for restarts."""
        await self._db.write(lambda connection: set_fact(connection, key, value))


def insert_event(connection: Connection, kind: str, data: Mapping[str, Any], now: float) -> RunEvent:
    """Append an event in the caller's transaction, together with the reported change. `connection` is in a transaction
    of the writing thread. `now`: Unix seconds.
    """
    result = connection.execute(
        events.insert(), {"at": now, "kind": kind, "step": _step_of(data), "data": to_json(dict(data))}
    )
    key = result.inserted_primary_key
    assert key is not None
    return RunEvent(event_id=key[0], at=now, kind=kind, data=dict(data))


def _step_of(data: Mapping[str, Any]) -> int | None:
    """Return the step that an event is about; None: it names none."""
    step = data.get("step")
    return int(step) if isinstance(step, int | float) else None


def read_events(connection: Connection, after: int, limit: int) -> list[RunEvent]:
    """Return up to `limit` events with a larger id than `after`, oldest first. Works in any process."""
    rows = connection.execute(select(events).where(events.c.event_id > after).order_by(events.c.event_id).limit(limit))
    return [event_of(row) for row in rows]


def event_of(row: Any) -> RunEvent:
    """Return the event of a row of `events`; what is damaged of it stands under the key `damaged` of its data."""
    try:
        return _EVENT.validate_python(
            {"data": object_of(row.data), "event_id": row.event_id, "at": row.at, "kind": row.kind}
        )
    except ValueError:  # its time or its kind is none
        damage = {"damaged": str((row.at, row.kind))[:EXCERPT]}
        return RunEvent(event_id=row.event_id, at=0.0, kind="damaged", data=damage)


def object_of(text: Any) -> dict[str, Any]:
    """Return the JSON object in a text; if damaged, the text under the key `damaged`."""
    try:
        found = orjson.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"damaged": str(text)[:EXCERPT]}


def read_metrics(connection: Connection) -> list[dict[str, float]]:
    """Return finished rows, in order of steps. Works in any process."""
    wanted = select(metric_rows.c.data).order_by(metric_rows.c.step)
    return [orjson.loads(row) for row in connection.execute(wanted).scalars()]


class RecordedMetrics(NamedTuple):
    """The finished rows of a run.

    Attributes:
        rows: in order of steps, each with its `step` and numbers only.
    """

    rows: list[dict[str, float]]
    damaged: list[int]


def readable_metrics(connection: Connection, last: int | None = None, after: int = -1) -> RecordedMetrics:
    """Return finished rows for people to look at: a damaged one does not hide the others. Works in any process.
    `after`: only rows of later steps; -1: all.
    """
    newest = select(metric_rows.c.step, metric_rows.c.data).order_by(metric_rows.c.step.desc()).limit(last)
    return _recorded(connection, newest.where(metric_rows.c.step > after))


def readable_row(connection: Connection, step: int) -> RecordedMetrics:
    """Return the row of one step, if it is finished, as `readable_metrics` does."""
    row = select(metric_rows.c.step, metric_rows.c.data).where(metric_rows.c.step == step)
    return _recorded(connection, row)


def _recorded(connection: Connection, wanted: sa.Select[Any]) -> RecordedMetrics:
    """Return the rows that a statement finds newest first, oldest first."""
    found = RecordedMetrics([], [])
    for step, data in connection.execute(wanted):
        if (row := _readable_row(step, data)) is not None:
            found.rows.append(row)
        elif isinstance(step, int):
            found.damaged.append(step)
    return RecordedMetrics(found.rows[::-1], found.damaged[::-1])


def _readable_row(step: int, data: Any) -> dict[str, float] | None:
    """Return the numbers of a row of metrics; None: it is damaged."""
    try:
        row = orjson.loads(data)
    except (ValueError, TypeError):
        return None
    if not isinstance(row, dict) or row.get("step") != step:
        return None
    kinds = set(map(type, row.values()))  # of all values together: there may be thousands of rows
    if not kinds <= {int, float, NoneType}:
        return None
    return row if NoneType not in kinds else {name: value for name, value in row.items() if value is not None}


def is_finished(connection: Connection, step: int) -> bool:
    """Return whether a step's row, which is written last, exists. Works in any process."""
    return connection.execute(select(metric_rows.c.step).where(metric_rows.c.step == step)).first() is not None


def read_manifest(connection: Connection, step: int) -> BatchManifest | None:
    """Return the manifest of a step, or None. Works in any process."""
    row = connection.execute(select(manifests).where(manifests.c.step == step)).first()
    if row is None:
        return None
    return BatchManifest(
        step=row.step,
        versions={policy: PolicyVersion(*version) for policy, version in orjson.loads(row.versions).items()},
        episode_ids=tuple(orjson.loads(row.episode_ids)),
        seed=int(row.seed),
        config_digest=row.config_digest,
    )


def _unfinished_step(connection: Connection) -> int | None:
    """Return the step whose row waits for its evaluation, or None."""
    found = read_fact(connection, UNFINISHED)
    return None if found is None else int(orjson.loads(found)["step"])


def read_fact(connection: Connection, key: str) -> str | None:
    """Return a fact of the run, or None."""
    return connection.execute(select(meta.c.value).where(meta.c.key == key)).scalar()


def set_fact(connection: Connection, key: str, value: str) -> None:
    """Store a fact of the run in the caller's transaction."""
    connection.execute(sa.delete(meta).where(meta.c.key == key))
    connection.execute(meta.insert(), {"key": key, "value": value})
