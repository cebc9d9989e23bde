"""Changes of tenants, users and keys: allowed or refused, and recorded in the audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from palestra.errors import InvalidRequest, NotFound
from palestra_control.wire import AuditEntry
from palestra_service.accounts.identity import Identities, Identity
from palestra_service.placement.tenants import Quota
from palestra_service.rights import OPERATOR_TENANT, KeyLimits, KeyRecord, NewKey, Role, digest_of, make_secret
from palestra_service.store import accounts, allowances, decisions
from palestra_service.store.accounts import UserRecord
from palestra_service.store.allowances import Spent
from palestra_service.store.control_store import ControlStore
from palestra_service.store.stored_text import IDENTIFIER, check_identifier, check_name

T = TypeVar("T")
FIRST_USER = "admin"


class Administration:
    """Operations of the account routes.

    Every method except `first_start` and `recover` checks the permission of `by`, and raises Forbidden.
    """

    def __init__(self, store: ControlStore, identities: Identities) -> None:
        """Administer the accounts of a store; `identities` drops keys that a change concerns."""
        self._store, self._identities = store, identities

    async def first_start(self) -> NewKey | None:
        """Create the first tenant and its admin, and return the admin's key; None: there are tenants already."""
        key = self._new_key(OPERATOR_TENANT, FIRST_USER, "first start")

        def work(connection: Connection) -> bool:
            if _is_stored(connection, key):
                return True
            if accounts.tenant_names(connection):
                return False
            _found(connection, key)
            self._log(connection, None, OPERATOR_TENANT, "tenant.add", OPERATOR_TENANT)
            return True

        return key if await self._store.write(work) else None

    async def first_admin_is_unused(self) -> bool:
        """Return whether no key of the first admin was ever used, perhaps because it was never seen."""
        keys = await self._store.read(lambda c: accounts.keys_of(c, OPERATOR_TENANT, FIRST_USER))
        return all(key.last_used_at is None for key in keys)

    async def recover(self) -> NewKey:
        """Return a new key of the first admin, created if necessary, for an operator who has lost all keys.

        This needs access to the control store.
        """
        key = self._new_key(OPERATOR_TENANT, FIRST_USER, "recovery")

        def work(connection: Connection) -> None:
            if not accounts.tenant_names(connection):
                _found(connection, key)
            else:
                accounts.change_role(connection, OPERATOR_TENANT, FIRST_USER, Role.ADMIN)
                _add(connection, key)
            self._log(connection, None, OPERATOR_TENANT, "key.make", key.record.key_id)

        return await self._write_key(key, work)

    async def admin_key(self, by: Identity, tenant: str) -> NewKey:
        """Create a key of a tenant's admin, for the operator: the first admin, or else the oldest one."""
        by.require_operator()
        _check_known(tenant, "tenant")
        users = await self._store.read(lambda c: accounts.users_of(c, tenant))
        admins = [user for user in users if user.role is Role.ADMIN and user.removed_at is None]
        if not admins:
            raise NotFound(f"there is no tenant {tenant}")
        name = min(admins, key=lambda user: (user.name != FIRST_USER, user.created_at, user.name)).name
        key = self._new_key(tenant, name, "by the operator")

        def work(connection: Connection) -> None:
            _add(connection, key)
            for log in dict.fromkeys((by.tenant, tenant)):
                self._log(connection, by, log, "key.make", f"{key.record.key_id} of {name} of {tenant}")

        return await self._write_key(key, work)

    async def tenants(self, by: Identity) -> dict[str, tuple[Quota, Spent]]:
        """Return the quotas of all tenants by name, and what their jobs have spent of their budgets."""
        by.require_operator()
        found = await self._store.read(decisions.quotas_of_all)
        return {
            name: (quota or Quota(), await self._store.read(partial(allowances.given_to, tenant=name)))
            for name, quota in found.items()
        }

    async def add_tenant(self, by: Identity, name: str) -> NewKey:
        """Add a tenant with one admin, and return the admin's key."""
        by.require_operator()
        check_identifier(name, "tenant")
        key = self._new_key(name, FIRST_USER, "first")
        return await self._write_key(key, self._logged(by, "tenant.add", name, lambda c: _found(c, key)))

    async def change_quota(self, by: Identity, tenant: str, changes: Mapping[str, float | None]) -> tuple[Quota, Spent]:
        """Change a tenant's quota, and return it with what its jobs have spent. Running jobs continue.

        `changes`: amounts by the names of `Quota`; None: unlimited. Others are unchanged.
        """
        by.require_operator()
        _check_known(tenant, "tenant")

        def work(connection: Connection) -> tuple[Quota, Spent]:
            quota = decisions.change_quota(connection, tenant, changes)
            self._log(connection, by, by.tenant, "tenant.change", f"quota of {tenant}: {quota.in_words}")
            return quota, allowances.given_to(connection, tenant)

        return await self._store.write(work, lambda _: self._store.changed.notify())

    async def drain(self, by: Identity, on: bool) -> None:
        """Stop starting jobs, persistently; with `on` False, resume."""
        by.require_operator()
        target = "on" if on else "off"
        work = self._logged(by, "cluster.drain", target, lambda c: decisions.set_draining(c, on))
        await self._store.write(work, lambda _: self._store.changed.notify())

    async def users(self, by: Identity) -> list[UserRecord]:
        """Return all users of the caller's tenant, including removed ones."""
        by.require_admin()
        return await self._store.read(lambda c: accounts.users_of(c, by.tenant))

    async def add_user(self, by: Identity, name: str, role: Role) -> NewKey:
        """Add a user, and return the user's first key. Raises Conflict if the name is or was in use."""
        by.require_admin()
        check_identifier(name, "user")
        key = self._new_key(by.tenant, name, "first")

        def work(connection: Connection) -> None:
            accounts.add_user(connection, by.tenant, name, role, key.record.created_at)
            _add(connection, key)

        return await self._write_key(key, self._logged(by, "user.add", f"{name} as {role}", work))

    async def change_role(self, by: Identity, name: str, role: Role) -> None:
        """Change a user's role immediately. Raises Conflict if the tenant would have no admin."""
        by.require_admin()
        _check_known(name, "user")
        change = partial(accounts.change_role, tenant=by.tenant, name=name, role=role)
        work = self._logged(by, "user.change", f"{name} to {role}", change)
        await self._store.write(work, lambda _: self._identities.forget(by.tenant, name))

    async def remove_user(self, by: Identity, name: str) -> None:
        """Remove a user and revoke the user's keys immediately. Raises Conflict if the tenant would have no admin."""
        by.require_admin()
        _check_known(name, "user")
        now, has_run = self._store.clock.now(), False

        def work(connection: Connection) -> None:
            nonlocal has_run
            users = accounts.users_of(connection, by.tenant) if has_run else []
            if any((user.name, user.removed_at) == (name, now) for user in users):
                return  # the commit of the first run was not answered
            accounts.remove_user(connection, by.tenant, name, now)
            self._log(connection, by, by.tenant, "user.remove", name)
            has_run = True

        await self._store.write(work, lambda _: self._identities.forget(by.tenant, name))

    async def keys(self, by: Identity, user: str | None = None) -> list[KeyRecord]:
        """Return the keys of a user; None: the caller's."""
        name = by.user if user is None else user
        by.require_own(name)
        _check_known(name, "user")
        return await self._store.read(lambda c: accounts.keys_of(c, by.tenant, name))

    async def create_key(
        self,
        by: Identity,
        user: str | None = None,
        label: str = "",
        lifetime_seconds: float | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> NewKey:
        """Create a key of a user; None: no expiry, the caller's limits. Only an admin sets `limits`."""
        name = by.user if user is None else user
        by.require_own(name)
        _check_known(name, "user")
        check_name(label, "label", may_be_empty=True)
        if limits is not None:
            by.require_admin()
        if lifetime_seconds is not None and not 0 < lifetime_seconds < 1e10:
            raise InvalidRequest("lifetime_seconds has to be a number above 0", "lifetime_seconds")
        known = by.limits if by.key_id else KeyLimits()
        key = self._new_key(by.tenant, name, label, lifetime_seconds, replace(known, **(limits or {})))
        target = f"{key.record.key_id} of {name}"
        return await self._write_key(key, self._logged(by, "key.make", target, lambda c: _add(c, key)))

    async def revoke_key(self, by: Identity, key_id: str) -> None:
        """Revoke a key immediately."""
        if not (key_id.isascii() and key_id.isalnum() and len(key_id) <= 64):
            raise NotFound("there is no such key")
        key, now = await self._store.read(lambda c: accounts.key(c, by.tenant, key_id)), self._store.clock.now()
        if not by.owns(key.user):
            raise NotFound(f"there is no key {key_id}")
        target = f"{key_id} of {key.user}"
        work = self._logged(by, "key.revoke", target, lambda c: accounts.revoke_key(c, key_id, now))
        await self._store.write(work, lambda _: self._identities.forget(key.tenant, key.user))

    async def _write_key(self, key: NewKey, work: Callable[[Connection], None]) -> NewKey:
        """Execute an operation that stores a new key, once: a commit without an answer is recognised by the key."""

        def once(connection: Connection) -> None:
            if not _is_stored(connection, key):
                work(connection)

        await self._store.write(once, lambda _: self._identities.forget(key.record.tenant, key.record.user))
        return key

    def _new_key(
        self,
        tenant: str,
        user: str,
        label: str,
        lifetime_seconds: float | None = None,
        limits: KeyLimits | None = None,
    ) -> NewKey:
        key_id, secret = make_secret(secrets.token_bytes)
        now = self._identities.expiry.now()
        record = KeyRecord(
            key_id=key_id,
            tenant=tenant,
            user=user,
            label=label,
            limits=limits or KeyLimits(),
            created_at=now,
            expires_at=None if lifetime_seconds is None else now + lifetime_seconds,
            revoked_at=None,
            last_used_at=None,
        )
        return NewKey(record=record, secret=secret)

    def _logged(
        self, by: Identity, what: str, target: str, work: Callable[[Connection], T]
    ) -> Callable[[Connection], T]:
        """Return an operation that also appends to the audit log of the caller's tenant."""

        def both(connection: Connection) -> T:
            result = work(connection)
            self._log(connection, by, by.tenant, what, target)
            return result

        return both

    def _log(self, connection: Connection, by: Identity | None, tenant: str, what: str, target: str) -> None:
        who, key_id = ("palestra", None) if by is None else (by.user, by.key_id)
        entry = AuditEntry(at=self._store.clock.now(), who=who, key_id=key_id, what=what, target=target)
        accounts.append_audit(connection, tenant, secrets.token_hex(16), entry)


def _add(connection: Connection, key: NewKey) -> None:
    accounts.add_key(connection, key.record, digest_of(key.secret))


def _found(connection: Connection, key: NewKey) -> None:
    record = key.record
    accounts.add_tenant(connection, record.tenant, record.created_at)
    accounts.add_user(connection, record.tenant, record.user, Role.ADMIN, record.created_at)
    _add(connection, key)


def _is_stored(connection: Connection, key: NewKey) -> bool:
    return accounts.stored_key(connection, key.record.key_id) is not None


def _check_known(name: str, what: str) -> None:
    if IDENTIFIER.fullmatch(name) is None:
        raise NotFound(f"there is no such {what}")
