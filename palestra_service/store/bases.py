"""Base servers of a service, as operations on a connection; see `jobs` about operations that run a second time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from palestra.types.states import BaseState
from palestra_control.jobs import BaseKind, BaseRecord, Resources
from palestra_service.store.stored_text import clean
from palestra_service.store.tables import bases

MAX_REASON = 4096  # characters


def all_bases(connection: Connection) -> list[BaseRecord]:
    """Return every base server that has not ended, oldest first."""
    rows = connection.execute(select(bases).order_by(bases.c.created_at, bases.c.base_id))
    return [_record_of(row) for row in rows]


def put(connection: Connection, base: BaseRecord) -> None:
    """Insert or update a base server, whose state change the caller has checked, in a transaction of the writing
    thread.
    """
    remove(connection, base.base_id)
    held = base.resources
    connection.execute(
        bases.insert(),
        {
            "base_id": base.base_id,
            "model": base.kind.model,
            "deterministic": base.kind.deterministic,
            "state": base.state.value,
            "reason": clean(base.reason, MAX_REASON),
            "node": base.node,
            "cpus": held.cpus,
            "gpus": held.gpus,
            "memory_gib": held.memory_gib,
            "address": base.address,
            "created_at": base.created_at,
            "changed_at": base.changed_at,
            "starts": base.starts,
        },
    )


def remove(connection: Connection, base_id: str) -> None:
    """Remove an ended base server."""
    connection.execute(bases.delete().where(bases.c.base_id == base_id))


def _record_of(row: Any) -> BaseRecord:
    """Return the base server that a row of `bases` holds."""
    return BaseRecord(
        base_id=row.base_id,
        kind=BaseKind(row.model, row.deterministic),
        state=BaseState(row.state),
        reason=row.reason,
        node=row.node,
        resources=Resources(cpus=row.cpus, gpus=row.gpus, memory_gib=row.memory_gib),
        address=row.address,
        created_at=row.created_at,
        changed_at=row.changed_at,
        starts=row.starts,
    )
