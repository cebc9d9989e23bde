"""Keys of users: how one is made, shown, read and stored, and when it has expired.

A secret is 32 random bytes, shown once. Stored is its SHA-256: nobody can try all of 2^256 secrets, so a slow hash,
which is what passwords need, would only make every request slow.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.scheduler.limits import KeyLimits
from palestra.scheduler.permissions import Scope
from palestra.schemas.clock import Clock

SECRET_BYTES = 32
ID_BYTES = 6
_FORM = re.compile(r"pk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """What is known of a key; with this nobody gets in."""

    key_id: str
    tenant: str
    user: str
    label: str  # what its owner calls it
    scopes: frozenset[Scope]
    limits: KeyLimits
    created_at: float  # Unix seconds
    expires_at: float | None  # Unix seconds; None: never
    revoked_at: float | None  # Unix seconds; None: it was not
    last_used_at: float | None  # Unix seconds, up to some minutes late; None: never
    replaced_by: str | None  # the key that it was rotated to


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """A key that was just made: the only moment at which its secret is known."""

    record: KeyRecord
    secret: str = field(repr=False)  # `pk_<key id>_<secret>`, to be shown to its owner once


def make_secret(random: Callable[[int], bytes]) -> tuple[str, str]:
    """A new key id, and the text that opens."""
    key_id = random(ID_BYTES).hex()
    return key_id, f"pk_{key_id}_{base64.urlsafe_b64encode(random(SECRET_BYTES)).decode().rstrip('=')}"


def key_id_of(secret: str) -> str | None:
    """The id that a key names; None where it has not the form of one."""
    found = _FORM.fullmatch(secret)
    return found[1] if found else None


def digest_of(secret: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def fits(secret: str, digest: str) -> bool:
    """Whether this is the key of which `digest` was stored; takes as long for a wrong one."""
    return hmac.compare_digest(digest_of(secret), digest)


class ExpiryClock:
    """The time by which keys expire: the later of the machine's clock and the time that has really passed.

    Where the clock is set back, no key lives longer than it was to; where it jumps ahead, keys may expire too early,
    and are good again when the clock is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        """Unix seconds."""
        return max(self._clock.now(), self._clock.monotonic() + self._offset)
