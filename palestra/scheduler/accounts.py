"""Tenants, users and their keys, as operations on a connection. Nothing is deleted: the audit log points at it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, func, select

from palestra.database import to_json
from palestra.errors import Conflict, NotFound
from palestra.scheduler.keys import KeyRecord
from palestra.scheduler.limits import KeyLimits
from palestra.scheduler.permissions import Role, Scope
from palestra.scheduler.tables import keys, tenants, users


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRecord:
    """One user of one tenant."""

    tenant: str
    name: str
    role: Role
    created_at: float  # Unix seconds
    removed_at: float | None  # Unix seconds; None: may come in


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKey:
    """All that is needed to let somebody in."""

    record: KeyRecord
    digest: str
    role: Role


def tenant_names(connection: Connection) -> list[str]:
    """All tenants, by name."""
    return sorted(connection.execute(select(tenants.c.name)).scalars())


def add_tenant(connection: Connection, name: str, now: float) -> None:
    """A tenant without users.

    Raises:
        Conflict: there is one.
    """
    if connection.execute(select(tenants.c.name).where(tenants.c.name == name)).first():
        raise Conflict(f"there is a tenant {name} already")
    connection.execute(tenants.insert(), {"name": name, "created_at": now})


def user(connection: Connection, tenant: str, name: str) -> UserRecord:
    """One user who was not removed.

    Raises:
        NotFound: there is none.
    """
    row = connection.execute(
        select(users).where(users.c.tenant == tenant, users.c.name == name, users.c.removed_at.is_(None))
    ).first()
    if row is None:
        raise NotFound(f"there is no user {name}")
    return _user_of(row)


def users_of(connection: Connection, tenant: str) -> list[UserRecord]:
    """All users, also those who were removed, by name."""
    rows = connection.execute(select(users).where(users.c.tenant == tenant))
    return sorted((_user_of(row) for row in rows), key=lambda known: known.name)


def add_user(connection: Connection, tenant: str, name: str, role: Role, now: float) -> None:
    """A user without keys.

    Raises:
        Conflict: there is one, or was: what one person did is never another's.
    """
    known = connection.execute(select(users.c.removed_at).where(users.c.tenant == tenant, users.c.name == name)).first()
    if known is not None:
        raise Conflict(f"there {'is' if known.removed_at is None else 'was'} a user {name} already; take another name")
    connection.execute(users.insert(), {"tenant": tenant, "name": name, "role": role.value, "created_at": now})


def change_role(connection: Connection, tenant: str, name: str, role: Role) -> None:
    """What a user may do from now on.

    Raises:
        NotFound: there is no such user.
        Conflict: nobody would be left to administer the tenant.
    """
    known = user(connection, tenant, name)
    if known.role is Role.ADMIN and role is not Role.ADMIN:
        _require_another_admin(connection, known)
    connection.execute(users.update().where(users.c.tenant == tenant, users.c.name == name).values(role=role.value))


def remove_user(connection: Connection, tenant: str, name: str, now: float) -> None:
    """Nobody comes in as this user any more; all keys are revoked.

    Raises:
        NotFound: there is no such user.
        Conflict: nobody would be left to administer the tenant.
    """
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
    """A new key of a user who is there.

    Raises:
        NotFound: the user is not.
    """
    user(connection, record.tenant, record.user)
    connection.execute(
        keys.insert(),
        {
            "key_id": record.key_id,
            "tenant": record.tenant,
            "user_name": record.user,
            "label": record.label,
            "digest": digest,
            "scopes": to_json(sorted(record.scopes)),
            "limits": to_json(asdict(record.limits)),
            "created_at": record.created_at,
            "expires_at": record.expires_at,
        },
    )


def stored_key(connection: Connection, key_id: str) -> StoredKey | None:
    """A key of a user who was not removed, with the role that the user has now."""
    row = connection.execute(
        select(keys, users.c.role)
        .join(users, (users.c.tenant == keys.c.tenant) & (users.c.name == keys.c.user_name))
        .where(keys.c.key_id == key_id, users.c.removed_at.is_(None))
    ).first()
    return None if row is None else StoredKey(record=_key_of(row), digest=row.digest, role=Role(row.role))


def key(connection: Connection, tenant: str, key_id: str) -> KeyRecord:
    """One key of a tenant.

    Raises:
        NotFound: there is none, or it is another tenant's.
    """
    row = connection.execute(select(keys).where(keys.c.tenant == tenant, keys.c.key_id == key_id)).first()
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    return _key_of(row)


def keys_of(connection: Connection, tenant: str, name: str | None) -> list[KeyRecord]:
    """The keys of a user, or of the whole tenant, newest first."""
    wanted = select(keys).where(keys.c.tenant == tenant).order_by(keys.c.created_at.desc(), keys.c.key_id)
    if name is not None:
        wanted = wanted.where(keys.c.user_name == name)
    return [_key_of(row) for row in connection.execute(wanted)]


def revoke_key(connection: Connection, key_id: str, now: float) -> None:
    """The key opens nothing any more; a second time changes nothing."""
    connection.execute(keys.update().where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None)).values(revoked_at=now))


def replace_key(connection: Connection, key_id: str, following: str, expires_at: float) -> None:
    """The key was rotated, and opens until `expires_at`, or until its own end where that is earlier."""
    earlier = func.coalesce(keys.c.expires_at, expires_at) < expires_at
    connection.execute(keys.update().where(keys.c.key_id == key_id, ~earlier).values(expires_at=expires_at))
    connection.execute(keys.update().where(keys.c.key_id == key_id).values(replaced_by=following))


def touch_key(connection: Connection, key_id: str, now: float) -> None:
    """The key was used."""
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
    return UserRecord(
        tenant=row.tenant, name=row.name, role=Role(row.role), created_at=row.created_at, removed_at=row.removed_at
    )


def _key_of(row: Any) -> KeyRecord:
    return KeyRecord(
        key_id=row.key_id,
        tenant=row.tenant,
        user=row.user_name,
        label=row.label,
        scopes=frozenset(Scope(name) for name in orjson.loads(row.scopes)),
        limits=KeyLimits(**orjson.loads(row.limits)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        replaced_by=row.replaced_by,
    )
