"""Who sends a request: from a key to a tenant, a user, and what they may do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from palestra.errors import Forbidden, StoreError, Unauthorized
from palestra.scheduler import accounts
from palestra.scheduler.accounts import StoredKey
from palestra.scheduler.control_store import ControlStore
from palestra.scheduler.keys import ExpiryClock, fits, key_id_of
from palestra.scheduler.limits import KeyLimits
from palestra.scheduler.permissions import OPERATOR_TENANT, PERMISSIONS, Action, Role, Scope, scopes_of

log = logging.getLogger("palestra")
MOST_REMEMBERED = 4096  # keys
TOUCH_SECONDS = 300.0  # how late `last_used_at` may be
UNKNOWN = "this key is not known; it may have been revoked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who sends a request, and what its key may do."""

    tenant: str
    user: str
    role: Role
    key_id: str | None  # None: without keys, on this machine alone
    scopes: frozenset[Scope]
    limits: KeyLimits

    def may(self, action: Action, owner: str | None = None) -> bool:
        """Return whether the table of permissions allows an action. A private job has to be seen as well: `sees`.

        Args:
            action: what is to be done.
            owner: the user whom it is done to; None where that is no other user.
        """
        rule = PERMISSIONS[action]
        return (
            self.role in rule.roles
            and (rule.scope is None or rule.scope in self.scopes)
            and (not rule.operator or self.tenant == OPERATOR_TENANT)
            and (owner is None or owner == self.user or self.role in rule.others)
        )

    def sees(self, action: Action, owner: str | None) -> bool:
        """Whether a private job of `owner` is there at all for who wants to do `action` to it."""
        return owner == self.user or self.role in PERMISSIONS[action].private

    def require(self, action: Action, owner: str | None = None) -> None:
        """The same.

        Raises:
            Forbidden: it does not allow it; the message says what is missing.
        """
        if self.may(action, owner):
            return
        rule = PERMISSIONS[action]
        if self.role in rule.roles and rule.scope is not None and rule.scope not in self.scopes:
            raise Forbidden(f"{action} needs a key with the scope {rule.scope}")
        raise Forbidden(f"a {self.role} may not do {action}" + (" to what is another user's" if owner else ""))


def local_operator() -> Identity:
    """Who everybody is where keys are turned off, which is only for a server that nobody else can reach."""
    return Identity(
        tenant=OPERATOR_TENANT,
        user="admin",
        role=Role.ADMIN,
        key_id=None,
        scopes=scopes_of(Role.ADMIN),
        limits=KeyLimits(requests_per_minute=1e9, burst=10**9, open_jobs=10**6, episodes_in_flight=10**6),
    )


class Identities:
    """Looks keys up, and remembers them until they are changed.

    What is remembered is right because all changes go through this process: it alone has the control store.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self.expiry = ExpiryClock(store.clock)
        self._known: OrderedDict[str, StoredKey] = OrderedDict()
        self._changes = 0  # a look-up during which this grew is not remembered
        self._touched: dict[str, float] = {}  # key id -> monotonic seconds
        self._touching: set[asyncio.Task[None]] = set()

    async def authenticate(self, secret: str | None) -> Identity:
        """Who has this key.

        Raises:
            Unauthorized: nobody; the message is the same whatever is wrong, unless the key is right and has expired.
        """
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
        """The same, as it is now, for what goes on for long; None: its key opens nothing any more."""
        if identity.key_id is None:
            return identity
        stored = await self._look_up(identity.key_id)
        if stored is None or stored.record.revoked_at is not None:
            return None
        over = stored.record.expires_at is not None and stored.record.expires_at <= self.expiry.now()
        return None if over else _identity_of(stored)

    def forget(self, tenant: str, user: str) -> None:
        """Something about this user or a key of theirs was changed: look it up again."""
        self._changes += 1
        for key_id, stored in list(self._known.items()):
            if (stored.record.tenant, stored.record.user) == (tenant, user):
                del self._known[key_id]

    async def settle(self) -> None:
        """Wait until the last uses of keys are written down."""
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
        scopes=key.scopes & scopes_of(stored.role),
        limits=key.limits,
    )
