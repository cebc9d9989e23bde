"""Base servers of a service, as operations on a connection; see `jobs` about operations that run a second time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from palestra.types.states import BaseState
from palestra_control.jobs import BaseKind, BaseRecord
from palestra_service.store.stored_text import clean
from palestra_service.store.tables import bases, resources_text, stored_resources

MAX_REASON = 4096  # characters
_ALIKE = ("base_id", "node", "address", "created_at", "changed_at", "starts")  # in records and in rows


def all_bases(connection: Connection) -> list[BaseRecord]:
    """Return every base server that has not ended, oldest first."""
    rows = connection.execute(select(bases).order_by(bases.c.created_at, bases.c.base_id))
    return [_record_of(row) for row in rows]


def put(connection: Connection, base: BaseRecord) -> None:
    """Insert or update a base server, whose state change the caller has checked."""
    remove(connection, base.base_id)
    connection.execute(
        bases.insert(),
        {name: getattr(base, name) for name in _ALIKE}
        | base.kind._asdict()
        | {"state": base.state.value, "reason": clean(base.reason, MAX_REASON)}
        | {"resources": resources_text(base.resources)},
    )


def remove(connection: Connection, base_id: str) -> None:
    """Remove an ended base server."""
    connection.execute(bases.delete().where(bases.c.base_id == base_id))


def _record_of(row: Any) -> BaseRecord:
    return BaseRecord(
        **{name: getattr(row, name) for name in _ALIKE},
        kind=BaseKind(row.model, row.deterministic),
        state=BaseState(row.state),
        reason=row.reason,
        resources=stored_resources(row.resources),
    )
