"""Keys of users: how a key is made, shown, read and stored, and when it has expired.

A secret is 32 random bytes, shown once. Its SHA-256 is stored: all of 2^256 secrets can't be tried, so a slow hash,
which passwords need, would only make every request slow.
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
    """A key without its secret, so that this record opens nothing.

    Attributes:
        key_id: names the key; a part of its text.
        tenant: the user's.
        user: to whom it belongs.
        label: the owner's name for it.
        limits: what it may use.
        created_at: Unix seconds.
        expires_at: Unix seconds; None: never.
        revoked_at: Unix seconds; None: it was not revoked.
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
    """A key that was just made: the only moment at which its secret is known.

    Attributes:
        record: of the key.
        secret: `pk_<key id>_<secret>`, shown to its owner once.
    """

    record: KeyRecord
    secret: str = field(repr=False)  # so that no log line contains it


def make_secret(random: Callable[[int], bytes]) -> tuple[str, str]:
    """Return a new key id, and the text of the key that contains it."""
    key_id = random(ID_BYTES).hex()
    return key_id, f"pk_{key_id}_{base64.urlsafe_b64encode(random(SECRET_BYTES)).decode().rstrip('=')}"


def key_id_of(secret: str) -> str | None:
    """Return the id in the text of a key; None: the text does not have the form of a key."""
    found = _FORM.fullmatch(secret)
    return found[1] if found else None


def digest_of(secret: str) -> str:
    """Return the digest of a key's text, which is stored in its place."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def fits(secret: str, digest: str) -> bool:
    """Return whether a text is the key with this digest. A wrong key takes as long as a right one."""
    return hmac.compare_digest(digest_of(secret), digest)


class ExpiryClock:
    """The time by which keys expire: the later of the machine's clock and the time that has really passed.

    If the clock is set back, no key lives longer than intended. If it jumps ahead, keys may expire too early, and work
    again when the clock is right.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        """Return Unix seconds that do not go back within this process."""
        return max(self._clock.now(), self._clock.monotonic() + self._offset)
