"""The audit log: who did what to whom, when, and with which result; never with a secret. Operations on a connection."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from palestra.control.store.stored_text import clean
from palestra.control.store.tables import audit

MAX_TEXT = 1024  # characters of a target or an outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One line of the audit log of a tenant.

    Attributes:
        number: 1, 2, … in the tenant; 0: not written yet.
        at: Unix seconds.
        who: name of a user, or of the part of Palestra that did it.
        key_id: of the key that was used; None: it was not done with a key.
        what: an Action.
        target: what it was done to.
        outcome: "ok", or the code of an error, with the number of similar ones that were not written before it.
    """

    number: int
    at: float
    who: str
    key_id: str | None
    what: str
    target: str
    outcome: str


def append(connection: Connection, tenant: str, entry_id: str, entry: AuditEntry) -> None:
    """Add a line to the log of a tenant; the same `entry_id` a second time adds nothing.

    Args:
        connection: in a transaction of the writing thread.
        entry_id: unique, so that a commit whose answer was lost can be repeated.
        entry: the line; its number is chosen here.
    """
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
    """Return lines of a tenant's log, newest first.

    Args:
        before: only lines with a smaller number; None: from the newest on.
    """
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
