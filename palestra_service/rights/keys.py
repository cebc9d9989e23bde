"""Keys of users: creating, formatting, parsing, storing and expiring them.

A secret is 32 random bytes, shown once. Its SHA-256 is stored: 2^256 secrets can't be tried, so a slow hash, needed for
passwords, would only slow down every request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.types.clock import Clock
from palestra_service.rights.limits import KeyLimits

SECRET_BYTES = 32
ID_BYTES = 6
_FORM = re.compile(r"pk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """A key without its secret.

    Attributes:
        key_id: names the key; part of its text.
        label: the owner's name for it.
        created_at: Unix seconds.
        expires_at: Unix seconds; None: never.
        revoked_at: Unix seconds; None: not revoked.
        last_used_at: Unix seconds, up to some minutes late; None: never.
    """

    key_id: str
    tenant: str
    user: str
    label: str
    limits: KeyLimits
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """A new key, at the only moment when its secret is known.

    Attributes:
        secret: `pk_<key id>_<secret>`, shown to its owner once.
    """

    record: KeyRecord
    secret: str = field(repr=False)  # so that no log line contains it


def make_secret(random: Callable[[int], bytes]) -> tuple[str, str]:
    """Return a new key id, and the key's text."""
    key_id = random(ID_BYTES).hex()
    return key_id, f"pk_{key_id}_{base64.urlsafe_b64encode(random(SECRET_BYTES)).decode().rstrip('=')}"


def key_id_of(secret: str) -> str | None:
    """Return the id in a key's text; None: the text is not a key."""
    found = _FORM.fullmatch(secret)
    return found[1] if found else None


def digest_of(secret: str) -> str:
    """Return the digest of a key's text, which is stored instead of it."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def fits(secret: str, digest: str) -> bool:
    """Return whether a text is the key with this digest, in constant time."""
    return hmac.compare_digest(digest_of(secret), digest)


class ExpiryClock:
    """The clock for the expiry of keys: the later of the machine's clock and the time that has really passed.

    If the clock is set back, no key lives longer than intended. If it jumps ahead, keys may expire too early, and work
    again when the clock is right.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        """Return Unix seconds that never go back within this process."""
        return max(self._clock.now(), self._clock.monotonic() + self._offset)
