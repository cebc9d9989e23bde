"""Who did what to whom, when, and what came of it; never with a secret. Operations on a connection."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from palestra.scheduler.stored_text import clean
from palestra.scheduler.tables import audit

MAX_TEXT = 1024  # characters of a target or an outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One line of the audit log of a tenant."""

    number: int  # 1, 2, … in the tenant; 0: not yet written
    at: float  # Unix seconds
    who: str  # a user's name, or what in Palestra did it
    key_id: str | None  # None: not by a key
    what: str  # an Action
    target: str
    outcome: str  # "ok", or the code of an error, with how many like it were left out before


def append(connection: Connection, tenant: str, entry_id: str, entry: AuditEntry) -> None:
    """Add a line; the same `entry_id` again adds nothing."""
    if connection.execute(select(audit.c.number).where(audit.c.entry_id == entry_id)).first():
        return
    last = select(func.coalesce(func.max(audit.c.number), 0)).where(audit.c.tenant == tenant)
    connection.execute(
        audit.insert(),
        {
            "tenant": tenant,
            "number": connection.execute(last).scalar_one() + 1,
            "entry_id": entry_id,
            "at": entry.at,
            "who": clean(entry.who, MAX_TEXT),
            "key_id": entry.key_id,
            "what": clean(entry.what, MAX_TEXT),
            "target": clean(entry.target, MAX_TEXT),
            "outcome": clean(entry.outcome, MAX_TEXT),
        },
    )


def page(connection: Connection, tenant: str, before: int | None, limit: int) -> list[AuditEntry]:
    """Up to `limit` lines, newest first, with a smaller number than `before`."""
    wanted = select(audit).where(audit.c.tenant == tenant).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(audit.c.number < before)
    return [
        AuditEntry(
            number=row.number,
            at=row.at,
            who=row.who,
            key_id=row.key_id,
            what=row.what,
            target=row.target,
            outcome=row.outcome,
        )
        for row in connection.execute(wanted)
    ]
