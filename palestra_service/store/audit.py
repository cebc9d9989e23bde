"""The audit log: who changed what, and when; without secrets. Operations on a connection."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, func, select

from palestra_service.store.stored_text import clean
from palestra_service.store.tables import audit

MAX_TEXT = 1024  # characters of a target


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One line of a tenant's audit log.

    Attributes:
        number: 1, 2, … in the tenant; 0: not written yet.
        at: Unix seconds.
        who: a user's name, or a part of Palestra.
        key_id: None: not done with a key.
    """

    number: int = 0
    at: float
    who: str
    key_id: str | None
    what: str
    target: str


def append(connection: Connection, tenant: str, entry_id: str, entry: AuditEntry) -> None:
    """Append a line to a tenant's log, with the next number.

    Repeating an `entry_id` has no effect, so that a commit without an answer can be repeated.
    """
    if connection.execute(select(audit.c.number).where(audit.c.entry_id == entry_id)).first():
        return
    last = connection.execute(select(func.coalesce(func.max(audit.c.number), 0)).where(audit.c.tenant == tenant))
    texts = {name: clean(getattr(entry, name), MAX_TEXT) for name in ("who", "what", "target")}
    row = asdict(entry) | texts | {"tenant": tenant, "entry_id": entry_id, "number": last.scalar_one() + 1}
    connection.execute(audit.insert(), row)


def audit_page(connection: Connection, tenant: str, before: int | None, limit: int) -> list[AuditEntry]:
    """Return lines of a tenant's log, newest first."""
    shown = [audit.c[name] for name in AuditEntry.__slots__]
    wanted = select(*shown).where(audit.c.tenant == tenant).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(audit.c.number < before)
    return [AuditEntry(**row._mapping) for row in connection.execute(wanted)]
