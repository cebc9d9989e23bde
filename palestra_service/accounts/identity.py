"""The sender of a request: from a key to a tenant, a user and a role."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from palestra.errors import Forbidden, StoreError, Unauthorized
from palestra_service.rights import (
    OPERATOR_TENANT,
    ExpiryClock,
    KeyLimits,
    Role,
    fits,
    key_id_of,
)
from palestra_service.store import accounts
from palestra_service.store.accounts import StoredKey
from palestra_service.store.control_store import ControlStore

log = logging.getLogger("palestra")
MOST_REMEMBERED = 4096
TOUCH_SECONDS = 300.0  # how late `last_used_at` may be, which saves most writes
UNKNOWN = "this key is not known; it may have been revoked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The sender of a request, with the rights of its key.

    Attributes:
        key_id: None: keys are disabled, which is only allowed for a server on this machine.
    """

    tenant: str
    user: str
    role: Role
    key_id: str | None
    limits: KeyLimits

    @property
    def is_operator(self) -> bool:
        """Return whether the sender runs the cluster: admins of `OPERATOR_TENANT` do."""
        return self.role is Role.ADMIN and self.tenant == OPERATOR_TENANT

    def owns(self, user: str) -> bool:
        """Return whether the sender may change what a user of its tenant has."""
        return self.role is Role.ADMIN or user == self.user

    def require_own(self, user: str) -> None:
        """Raise Forbidden for a change of what another user has, except by an admin."""
        if not self.owns(user):
            raise Forbidden(f"only {user} and the admins of your tenant may do this")

    def require_admin(self) -> None:
        """Raise Forbidden unless the sender is an admin."""
        if self.role is not Role.ADMIN:
            raise Forbidden("only an admin of your tenant may do this")

    def require_operator(self) -> None:
        """Raise Forbidden unless the sender is an operator."""
        if not self.is_operator:
            raise Forbidden(f"only an admin of the tenant {OPERATOR_TENANT} may do this")


def local_operator() -> Identity:
    """Return the identity of all senders of a server without keys, which only this machine can reach."""
    return Identity(
        tenant=OPERATOR_TENANT,
        user="admin",
        role=Role.ADMIN,
        key_id=None,
        limits=KeyLimits(requests_per_minute=1e9, burst=10**9, open_jobs=10**6, episodes_in_flight=10**6),
    )


class Identities:
    """Looks up keys, with a cache.

    The cache is never stale, because only this process has the control store.

    Attributes:
        expiry: clock for the expiry of keys.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self.expiry = ExpiryClock(store.clock)
        self._known: OrderedDict[str, StoredKey] = OrderedDict()
        self._changes = 0  # a look-up during which this number grew is not remembered: it may be outdated
        self._touched: dict[str, float] = {}  # last stored use of each key, monotonic seconds
        self._touching: set[asyncio.Task[None]] = set()

    async def authenticate(self, secret: str | None) -> Identity:
        """Return the identity of a key."""
        if not secret:
            raise Unauthorized("no key; send the header `Authorization: Bearer <key>`")
        key_id = key_id_of(secret)
        stored = None if key_id is None else await self._look_up(key_id)
        if not fits(secret, stored.digest if stored else "") or stored is None or stored.record.revoked_at is not None:
            raise Unauthorized(UNKNOWN)
        key = stored.record
        if key.expires_at is not None and key.expires_at <= self.expiry.now():
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(key.expires_at))
            raise Unauthorized(f"this key expired at {at}; make a new one, or ask an admin of your tenant for one")
        self._touch(key.key_id)
        return _identity_of(stored)

    async def renewed(self, identity: Identity) -> Identity | None:
        """Return an identity with its present rights, for long-running requests; None: its key is no longer valid."""
        if identity.key_id is None:
            return identity
        stored = await self._look_up(identity.key_id)
        if stored is None or stored.record.revoked_at is not None:
            return None
        over = stored.record.expires_at is not None and stored.record.expires_at <= self.expiry.now()
        return None if over else _identity_of(stored)

    def forget(self, tenant: str, user: str) -> None:
        """Drop a user's cached keys after a change of the user or a key."""
        self._changes += 1
        for key_id, stored in list(self._known.items()):
            if (stored.record.tenant, stored.record.user) == (tenant, user):
                del self._known[key_id]

    async def settle(self) -> None:
        """Wait until the last uses of keys are stored."""
        while self._touching:
            await asyncio.gather(*self._touching)

    async def _look_up(self, key_id: str) -> StoredKey | None:
        stored = self._known.get(key_id)
        if stored is not None:
            self._known.move_to_end(key_id)
            return stored
        before = self._changes
        stored = await self._store.read(lambda c: accounts.stored_key(c, key_id))
        if stored is not None and before == self._changes:
            self._known[key_id] = stored
            if len(self._known) > MOST_REMEMBERED:
                forgotten, _ = self._known.popitem(last=False)
                self._touched.pop(forgotten, None)
        return stored

    def _touch(self, key_id: str) -> None:
        """Store that a key was used now, at most once in `TOUCH_SECONDS`, without delaying the request."""
        now = self._store.clock.monotonic()
        last = self._touched.get(key_id)
        if last is not None and now - last < TOUCH_SECONDS:
            return
        self._touched[key_id] = now
        task = asyncio.create_task(self._write_use(key_id, self._store.clock.now()))
        self._touching.add(task)
        task.add_done_callback(self._touching.discard)

    async def _write_use(self, key_id: str, now: float) -> None:
        try:
            await self._store.write(lambda c: accounts.touch_key(c, key_id, now))
        except StoreError as error:
            log.warning("the last use of key %s could not be written down: %s", key_id, error)


def _identity_of(stored: StoredKey) -> Identity:
    key = stored.record
    return Identity(
        tenant=key.tenant,
        user=key.user,
        role=stored.role,
        key_id=key.key_id,
        limits=key.limits,
    )
