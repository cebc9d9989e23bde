"""Tenants, users, their keys and the audit log, as operations on a connection; times are Unix seconds.

Rows are never deleted, because the audit log refers to them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.database import to_json
from palestra.errors import Conflict, NotFound
from palestra_control.wire import AuditEntry
from palestra_service.rights import KeyLimits, KeyRecord, Role
from palestra_service.store.stored_text import clean
from palestra_service.store.tables import audit, keys, tenants, users


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRecord:
    """One user of one tenant.

    Attributes:
        created_at: Unix seconds.
        removed_at: Unix seconds; None: not removed.
    """

    tenant: str
    name: str
    role: Role
    created_at: float
    removed_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKey:
    """The data that authenticates a request by its key.

    Attributes:
        digest: of its secret; see `keys.digest_of`.
        role: present role of its user.
    """

    record: KeyRecord
    digest: str
    role: Role


def tenant_names(connection: Connection) -> list[str]:
    """Return the names of all tenants, in alphabetical order."""
    return sorted(connection.execute(select(tenants.c.name)).scalars())


def add_tenant(connection: Connection, name: str, now: float) -> None:
    """Add a tenant without users."""
    if connection.execute(select(tenants.c.name).where(tenants.c.name == name)).first():
        raise Conflict(f"there is a tenant {name} already")
    connection.execute(tenants.insert(), {"name": name, "created_at": now})


def user(connection: Connection, tenant: str, name: str) -> UserRecord:
    """Return a user who was not removed."""
    row = connection.execute(
        select(users).where(users.c.tenant == tenant, users.c.name == name, users.c.removed_at.is_(None))
    ).first()
    if row is None:
        raise NotFound(f"there is no user {name}")
    return _user_of(row)


def users_of(connection: Connection, tenant: str) -> list[UserRecord]:
    """Return all users of a tenant by name, including removed ones."""
    rows = connection.execute(select(users).where(users.c.tenant == tenant))
    return sorted((_user_of(row) for row in rows), key=lambda known: known.name)


def add_user(connection: Connection, tenant: str, name: str, role: Role, now: float) -> None:
    """Add a user without keys. `name`: names of removed users are not reused, so that the audit log is unambiguous."""
    known = connection.execute(select(users.c.removed_at).where(users.c.tenant == tenant, users.c.name == name)).first()
    if known is not None:
        raise Conflict(f"there {'is' if known.removed_at is None else 'was'} a user {name} already; take another name")
    connection.execute(users.insert(), {"tenant": tenant, "name": name, "role": role.value, "created_at": now})


def change_role(connection: Connection, tenant: str, name: str, role: Role) -> None:
    """Change a user's role. Raises Conflict if the tenant would have no admin."""
    known = user(connection, tenant, name)
    if known.role is Role.ADMIN and role is not Role.ADMIN:
        _require_another_admin(connection, known)
    connection.execute(users.update().where(users.c.tenant == tenant, users.c.name == name).values(role=role.value))


def remove_user(connection: Connection, tenant: str, name: str, now: float) -> None:
    """Remove a user, and revoke the user's keys. Raises Conflict if the tenant would have no admin."""
    known = user(connection, tenant, name)
    if known.role is Role.ADMIN:
        _require_another_admin(connection, known)
    connection.execute(users.update().where(users.c.tenant == tenant, users.c.name == name).values(removed_at=now))
    connection.execute(
        keys.update()
        .where(keys.c.tenant == tenant, keys.c.user_name == name, keys.c.revoked_at.is_(None))
        .values(revoked_at=now)
    )


def add_key(connection: Connection, record: KeyRecord, digest: str) -> None:
    """Add a key of a user who was not removed."""
    user(connection, record.tenant, record.user)
    connection.execute(
        keys.insert(),
        {
            "key_id": record.key_id,
            "tenant": record.tenant,
            "user_name": record.user,
            "label": record.label,
            "digest": digest,
            "limits": to_json(asdict(record.limits)),
            "created_at": record.created_at,
            "expires_at": record.expires_at,
        },
    )


def stored_key(connection: Connection, key_id: str) -> StoredKey | None:
    """Return a key with its user's present role; None: there is no such key, or its user was removed."""
    row = connection.execute(
        select(keys, users.c.role)
        .join(users, (users.c.tenant == keys.c.tenant) & (users.c.name == keys.c.user_name))
        .where(keys.c.key_id == key_id, users.c.removed_at.is_(None))
    ).first()
    return None if row is None else StoredKey(record=_key_of(row), digest=row.digest, role=Role(row.role))


def key(connection: Connection, tenant: str, key_id: str) -> KeyRecord:
    """Return the record of one key of a tenant."""
    row = connection.execute(select(keys).where(keys.c.tenant == tenant, keys.c.key_id == key_id)).first()
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    return _key_of(row)


def keys_of(connection: Connection, tenant: str, name: str | None) -> list[KeyRecord]:
    """Return the keys of a user, newest first."""
    wanted = select(keys).where(keys.c.tenant == tenant).order_by(keys.c.created_at.desc(), keys.c.key_id)
    if name is not None:
        wanted = wanted.where(keys.c.user_name == name)
    return [_key_of(row) for row in connection.execute(wanted)]


def revoke_key(connection: Connection, key_id: str, now: float) -> None:
    """Revoke a key; idempotent."""
    connection.execute(keys.update().where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None)).values(revoked_at=now))


def touch_key(connection: Connection, key_id: str, now: float) -> None:
    """Record a key's last use."""
    connection.execute(keys.update().where(keys.c.key_id == key_id).values(last_used_at=now))


def _require_another_admin(connection: Connection, last: UserRecord) -> None:
    others = select(func.count()).where(
        users.c.tenant == last.tenant,
        users.c.name != last.name,
        users.c.role == Role.ADMIN.value,
        users.c.removed_at.is_(None),
    )
    if connection.execute(others).scalar_one() == 0:
        raise Conflict(f"{last.name} is the last admin of this tenant; make another one first")


def _user_of(row: Any) -> UserRecord:
    return UserRecord(**{**row._mapping, "role": Role(row.role)})


def _key_of(row: Any) -> KeyRecord:
    known = {one.name: getattr(row, one.name) for one in fields(KeyRecord) if one.name not in ("user", "limits")}
    return KeyRecord(**known, user=row.user_name, limits=KeyLimits(**orjson.loads(row.limits)))


MAX_TEXT = 1024  # characters of a target


def append_audit(connection: Connection, tenant: str, entry_id: str, entry: AuditEntry) -> None:
    """Append a line to a tenant's log, with the next number.

    Repeating an `entry_id` has no effect, so that a commit without an answer can be repeated.
    """
    if connection.execute(select(audit.c.number).where(audit.c.entry_id == entry_id)).first():
        return
    last = connection.execute(select(func.coalesce(func.max(audit.c.number), 0)).where(audit.c.tenant == tenant))
    texts = {name: clean(getattr(entry, name), MAX_TEXT) for name in ("who", "what", "target")}
    row = entry.model_dump() | texts | {"tenant": tenant, "entry_id": entry_id, "number": last.scalar_one() + 1}
    connection.execute(audit.insert(), row)


def audit_page(connection: Connection, tenant: str, before: int | None, limit: int) -> list[AuditEntry]:
    """Return lines of a tenant's log, newest first."""
    shown = [audit.c[name] for name in AuditEntry.model_fields]
    wanted = select(*shown).where(audit.c.tenant == tenant).order_by(audit.c.number.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(audit.c.number < before)
    return [AuditEntry(**row._mapping) for row in connection.execute(wanted)]
