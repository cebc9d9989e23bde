"""Changes of tenants, users and keys: checked against the table of permissions, and recorded in the audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from palestra.control.accounts.identity import Identities, Identity
from palestra.control.placement.tenants import Quota
from palestra.control.rights.keys import KeyRecord, NewKey, digest_of, make_secret
from palestra.control.rights.limits import KeyLimits
from palestra.control.rights.permissions import OPERATOR_TENANT, Action, Role, Scope, scopes_of
from palestra.control.store import accounts, audit, decisions
from palestra.control.store.accounts import UserRecord
from palestra.control.store.audit import AuditEntry
from palestra.control.store.control_store import ControlStore
from palestra.control.store.stored_text import IDENTIFIER, check_identifier, check_name
from palestra.errors import Forbidden, InvalidRequest, NotFound

FIRST_USER = "admin"
MOST_GRACE_SECONDS = 30 * 86400.0


class Administration:
    """The operations of the account routes.

    Every method except `first_start` and `recover` checks whether `by` may do it, and raises Forbidden if not.
    """

    def __init__(
        self, store: ControlStore, identities: Identities, random: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        """Administer the accounts of a store.

        Args:
            identities: forgets the keys that a change concerns.
            random: returns as many random bytes as it is asked for.
        """
        self._store, self._identities, self._random = store, identities, random

    async def first_start(self) -> NewKey | None:
        """Create the first tenant and its admin, and return the admin's key; None: there are tenants already."""
        key = self._new_key(OPERATOR_TENANT, FIRST_USER, "first start", scopes_of(Role.ADMIN))

        def work(connection: Connection) -> bool:
            if _is_stored(connection, key):
                return True
            if accounts.tenant_names(connection):
                return False
            self._found(connection, OPERATOR_TENANT, key)
            self._log(connection, None, OPERATOR_TENANT, Action.TENANT_ADD, OPERATOR_TENANT)
            return True

        return key if await self._store.write(work) else None

    async def first_admin_is_unused(self) -> bool:
        """Return whether no key of the first admin was ever used, perhaps because nobody has seen one."""
        keys = await self._store.read(lambda c: accounts.keys_of(c, OPERATOR_TENANT, FIRST_USER))
        return all(key.last_used_at is None for key in keys)

    async def recover(self) -> NewKey:
        """Return a new key of the first admin, for an operator who has lost all keys. Creates the admin if needed.

        Needs access to the control store.

        Raises:
            NotFound: that user was removed.
        """
        key = self._new_key(OPERATOR_TENANT, FIRST_USER, "recovery", scopes_of(Role.ADMIN))

        def work(connection: Connection) -> None:
            if not accounts.tenant_names(connection):
                self._found(connection, OPERATOR_TENANT, key)
            else:
                accounts.change_role(connection, OPERATOR_TENANT, FIRST_USER, Role.ADMIN)
                accounts.add_key(connection, key.record, digest_of(key.secret))
            self._log(connection, None, OPERATOR_TENANT, Action.KEY_MAKE, key.record.key_id)

        return await self._write_key(key, work)

    async def admin_key(self, by: Identity, tenant: str) -> NewKey:
        """Make a key of an admin of a tenant, for the operator. It is the first admin, or else the oldest one.

        Raises:
            NotFound: there is no such tenant.
        """
        by.require(Action.TENANT_CHANGE)
        if IDENTIFIER.fullmatch(tenant) is None:
            raise NotFound("there is no such tenant")
        users = await self._store.read(lambda c: accounts.users_of(c, tenant))
        admins = [user for user in users if user.role is Role.ADMIN and user.removed_at is None]
        if not admins:
            raise NotFound(f"there is no tenant {tenant}")
        name = min(admins, key=lambda user: (user.name != FIRST_USER, user.created_at, user.name)).name
        key = self._new_key(tenant, name, "by the operator", scopes_of(Role.ADMIN))

        def work(connection: Connection) -> None:
            accounts.add_key(connection, key.record, digest_of(key.secret))
            for log in dict.fromkeys((by.tenant, tenant)):
                self._log(connection, by, log, Action.KEY_MAKE, f"{key.record.key_id} of {name} of {tenant}")

        return await self._write_key(key, work)

    async def tenants(self, by: Identity) -> dict[str, Quota]:
        """Return all tenants by name, with their quotas."""
        by.require(Action.TENANT_LIST)
        found = await self._store.read(decisions.quotas_of_all)
        return {name: quota or Quota() for name, quota in found.items()}

    async def add_tenant(self, by: Identity, name: str) -> NewKey:
        """Add a tenant with one admin, and return the admin's key.

        Raises:
            Conflict: there is a tenant of this name.
        """
        by.require(Action.TENANT_ADD)
        check_identifier(name, "tenant")
        key = self._new_key(name, FIRST_USER, "first", scopes_of(Role.ADMIN))

        def work(connection: Connection) -> None:
            self._found(connection, name, key)
            self._log(connection, by, by.tenant, Action.TENANT_ADD, name)

        return await self._write_key(key, work)

    async def change_quota(self, by: Identity, tenant: str, changes: Mapping[str, float | None]) -> Quota:
        """Change what a tenant may hold, and return the whole quota. Running jobs are not stopped.

        Args:
            changes: amounts by the names of `Quota`; None: as much as there is. Amounts that are not named stay.

        Raises:
            NotFound: there is no such tenant.
        """
        by.require(Action.TENANT_CHANGE)
        if IDENTIFIER.fullmatch(tenant) is None:
            raise NotFound("there is no such tenant")

        def work(connection: Connection) -> Quota:
            quota = decisions.change_quota(connection, tenant, changes)
            self._log(connection, by, by.tenant, Action.TENANT_CHANGE, f"quota of {tenant}: {quota.in_words}")
            return quota

        return await self._store.write(work, lambda _: self._store.changed.notify())

    async def private_jobs(self, by: Identity) -> bool:
        """Return whether new jobs of `by`'s tenant are private by default."""
        by.require(Action.SELF_READ)
        return await self._store.read(lambda c: decisions.are_private(c, by.tenant))

    async def set_private(self, by: Identity, on: bool) -> None:
        """Set whether jobs of `by`'s tenant that are submitted from now on are private by default."""
        by.require(Action.TENANT_SET_PRIVATE)

        def work(connection: Connection) -> None:
            decisions.set_private(connection, by.tenant, on)
            self._log(connection, by, by.tenant, Action.TENANT_SET_PRIVATE, "on" if on else "off")

        await self._store.write(work)

    async def drain(self, by: Identity, on: bool) -> None:
        """Stop starting jobs, also after a restart; with `on` False, start jobs again."""
        by.require(Action.CLUSTER_DRAIN)

        def work(connection: Connection) -> None:
            decisions.set_draining(connection, on)
            self._log(connection, by, by.tenant, Action.CLUSTER_DRAIN, "on" if on else "off")

        await self._store.write(work, lambda _: self._store.changed.notify())

    async def users(self, by: Identity) -> list[UserRecord]:
        """Return all users of the caller's tenant, also those who were removed."""
        by.require(Action.USER_LIST)
        return await self._store.read(lambda c: accounts.users_of(c, by.tenant))

    async def add_user(self, by: Identity, name: str, role: Role, label: str = "first") -> NewKey:
        """Add a user, and return the user's first key, which has no scope that `by`'s key has not.

        Raises:
            Conflict: there is, or was, a user of this name.
        """
        by.require(Action.USER_ADD)
        check_identifier(name, "user")
        check_name(label, "label", may_be_empty=True)
        key = self._new_key(by.tenant, name, label, scopes_of(role) & by.scopes)

        def work(connection: Connection) -> None:
            accounts.add_user(connection, by.tenant, name, role, key.record.created_at)
            accounts.add_key(connection, key.record, digest_of(key.secret))
            self._log(connection, by, by.tenant, Action.USER_ADD, f"{name} as {role}")

        return await self._write_key(key, work)

    async def change_role(self, by: Identity, name: str, role: Role) -> None:
        """Give a user another role. Keys with more scopes than the role allows lose these scopes immediately.

        Raises:
            NotFound: there is no such user.
            Conflict: the tenant would have no admin.
        """
        by.require(Action.USER_CHANGE, name)
        _check_user(name)

        def work(connection: Connection) -> None:
            accounts.change_role(connection, by.tenant, name, role)
            self._log(connection, by, by.tenant, Action.USER_CHANGE, f"{name} to {role}")

        await self._store.write(work, lambda _: self._identities.forget(by.tenant, name))

    async def remove_user(self, by: Identity, name: str) -> None:
        """Remove a user; the user's keys are revoked immediately.

        Raises:
            NotFound: there is no such user.
            Conflict: the tenant would have no admin.
        """
        by.require(Action.USER_REMOVE, name)
        _check_user(name)
        now, has_run = self._store.clock.now(), False

        def work(connection: Connection) -> None:
            nonlocal has_run
            users = accounts.users_of(connection, by.tenant) if has_run else []
            if any((user.name, user.removed_at) == (name, now) for user in users):
                return  # the commit of the first run was not answered
            accounts.remove_user(connection, by.tenant, name, now)
            self._log(connection, by, by.tenant, Action.USER_REMOVE, name)
            has_run = True

        await self._store.write(work, lambda _: self._identities.forget(by.tenant, name))

    async def keys(self, by: Identity, user: str | None = None) -> list[KeyRecord]:
        """Return the keys of a user.

        Args:
            user: by name; None: the caller.
        """
        name = by.user if user is None else user
        by.require(Action.KEY_LIST, name)
        _check_user(name)
        return await self._store.read(lambda c: accounts.keys_of(c, by.tenant, name))

    async def create_key(
        self,
        by: Identity,
        user: str | None = None,
        label: str = "",
        scopes: Collection[Scope] | None = None,
        lifetime_seconds: float | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> NewKey:
        """Make a key of a user.

        Args:
            user: to whom the key will belong; None: the caller.
            scopes: what the key may be used for; None: all scopes that both the user's role and the caller's key have.
            lifetime_seconds: until the key expires; None: it does not.
            limits: by the names of `KeyLimits`; only an admin may set them. Those that are not named are the caller's.

        Raises:
            NotFound: there is no such user.
            Forbidden: the key would be stronger than the caller's key or the user's role.
        """
        name = by.user if user is None else user
        by.require(Action.KEY_MAKE, name)
        _check_user(name)
        check_name(label, "label", may_be_empty=True)
        if limits is not None and by.role is not Role.ADMIN:
            raise Forbidden("only an admin may set the limits of a key")
        if lifetime_seconds is not None and not 0 < lifetime_seconds < 1e10:
            raise InvalidRequest("lifetime_seconds has to be a number above 0", "lifetime_seconds")
        role = (await self._store.read(lambda c: accounts.user(c, by.tenant, name))).role
        most = scopes_of(role) & by.scopes
        wanted = most if scopes is None else frozenset(scopes)
        if not wanted <= most:
            raise Forbidden(f"this key can't give {', '.join(sorted(wanted - most))}")
        known = by.limits if by.key_id else KeyLimits()
        key = self._new_key(by.tenant, name, label, wanted, lifetime_seconds, replace(known, **(limits or {})))

        def work(connection: Connection) -> None:
            accounts.add_key(connection, key.record, digest_of(key.secret))
            self._log(connection, by, by.tenant, Action.KEY_MAKE, f"{key.record.key_id} of {name}")

        return await self._write_key(key, work)

    async def revoke_key(self, by: Identity, key_id: str) -> None:
        """Revoke a key immediately, so that it opens nothing any more.

        Raises:
            NotFound: there is no such key in the tenant.
        """
        key = await self._key(by, Action.KEY_REVOKE, key_id)
        now = self._store.clock.now()

        def work(connection: Connection) -> None:
            accounts.revoke_key(connection, key_id, now)
            self._log(connection, by, by.tenant, Action.KEY_REVOKE, f"{key_id} of {key.user}")

        await self._store.write(work, lambda _: self._identities.forget(key.tenant, key.user))

    async def rotate_key(self, by: Identity, key_id: str, grace_seconds: float = 86400.0) -> NewKey:
        """Make a new key like an old one, with the same lifetime, and let the old key expire.

        Args:
            grace_seconds: how long the old key still works.

        Raises:
            NotFound: there is no such key in the tenant, or it has expired or was revoked.
            Forbidden: it has scopes that the caller's key has not.
        """
        old = await self._key(by, Action.KEY_ROTATE, key_id)
        now = self._identities.expiry.now()
        if not 0 <= grace_seconds <= MOST_GRACE_SECONDS:
            raise InvalidRequest(f"grace_seconds has to be from 0 to {MOST_GRACE_SECONDS:g}", "grace_seconds")
        if not old.scopes <= by.scopes:
            raise Forbidden(f"this key can't give {', '.join(sorted(old.scopes - by.scopes))}")
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
        key = self._new_key(old.tenant, old.user, old.label, old.scopes, lifetime, old.limits)

        def work(connection: Connection) -> None:
            present = accounts.key(connection, old.tenant, key_id)  # read again: it may have been revoked meanwhile
            if present.revoked_at is not None or (present.expires_at is not None and present.expires_at <= now):
                raise NotFound(f"key {key_id} opens nothing any more; make a new one")
            accounts.add_key(connection, key.record, digest_of(key.secret))
            accounts.replace_key(connection, key_id, key.record.key_id, now + grace_seconds)
            self._log(connection, by, by.tenant, Action.KEY_ROTATE, f"{key_id} of {old.user} to {key.record.key_id}")

        return await self._write_key(key, work)

    async def _write_key(self, key: NewKey, work: Callable[[Connection], None]) -> NewKey:
        """Run an operation that stores a new key, once: a commit whose answer was lost is recognised by the key."""

        def once(connection: Connection) -> None:
            if not _is_stored(connection, key):
                work(connection)

        forget = key.record.tenant, key.record.user
        await self._store.write(once, lambda _: self._identities.forget(*forget))
        return key

    async def _key(self, by: Identity, action: Action, key_id: str) -> KeyRecord:
        """Return a key to which the caller may do `action`. A key that the caller may not see is not found."""
        by.require(action)
        if not (key_id.isascii() and key_id.isalnum() and len(key_id) <= 64):
            raise NotFound("there is no such key")
        key = await self._store.read(lambda c: accounts.key(c, by.tenant, key_id))
        if not by.may(action, key.user):
            raise NotFound(f"there is no key {key_id}")
        return key

    def _new_key(
        self,
        tenant: str,
        user: str,
        label: str,
        scopes: frozenset[Scope],
        lifetime_seconds: float | None = None,
        limits: KeyLimits | None = None,
    ) -> NewKey:
        """Return a new key with a random id and secret; it is not stored yet."""
        key_id, secret = make_secret(self._random)
        now = self._identities.expiry.now()
        record = KeyRecord(
            key_id=key_id,
            tenant=tenant,
            user=user,
            label=label,
            scopes=scopes,
            limits=limits or KeyLimits(),
            created_at=now,
            expires_at=None if lifetime_seconds is None else now + lifetime_seconds,
            revoked_at=None,
            last_used_at=None,
            replaced_by=None,
        )
        return NewKey(record=record, secret=secret)

    def _found(self, connection: Connection, tenant: str, key: NewKey) -> None:
        """Add a tenant with its first admin and the admin's key."""
        accounts.add_tenant(connection, tenant, key.record.created_at)
        accounts.add_user(connection, tenant, key.record.user, Role.ADMIN, key.record.created_at)
        accounts.add_key(connection, key.record, digest_of(key.secret))

    def _log(self, connection: Connection, by: Identity | None, tenant: str, action: Action, target: str) -> None:
        """Append a successful action to the audit log, in the caller's transaction."""
        entry = AuditEntry(
            number=0,
            at=self._store.clock.now(),
            who="palestra" if by is None else by.user,
            key_id=None if by is None else by.key_id,
            what=action.value,
            target=target,
            outcome="ok",
        )
        audit.append(connection, tenant, secrets.token_hex(16), entry)


def _is_stored(connection: Connection, key: NewKey) -> bool:
    """Return whether a key is in the store."""
    return accounts.stored_key(connection, key.record.key_id) is not None


def _check_user(name: str) -> None:
    """Refuse a name that no user can have."""
    if IDENTIFIER.fullmatch(name) is None:
        raise NotFound("there is no such user")
