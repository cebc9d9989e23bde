"""Roles of users, their keys, and the limits of one key.

A secret is 32 random bytes, shown once. Its SHA-256 is stored: 2^256 secrets can't be tried, so a slow hash, needed for
passwords, would only slow down every request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from palestra.errors import InvalidRequest, TooManyRequests
from palestra.types.clock import Clock

MOST_BUCKETS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """The limits of one key.

    Attributes:
        open_jobs: unfinished jobs of its user.
        episodes_in_flight: claimed episodes of each job submitted with the key.
    """

    requests_per_minute: float = 1200.0
    burst: int = 200
    open_jobs: int = 100
    body_bytes: int = 4 * 2**20
    episodes_in_flight: int = 10_000

    def __post_init__(self) -> None:
        """Raise InvalidRequest for limits below 1, which would lock a key out."""
        for name in self.__slots__:
            amount = getattr(self, name)
            if not (math.isfinite(amount) and 1 <= amount < 2**53):
                raise InvalidRequest(f"the limit {name} is {amount}; it has to be a number from 1 on", f"limits.{name}")


class TokenBucket:
    """A token bucket: allows `burst` requests immediately, then `per_second`."""

    def __init__(self, per_second: float, burst: int, clock: Clock) -> None:
        self._per_second, self._burst, self._clock = per_second, float(burst), clock
        self._left, self._at = float(burst), clock.monotonic()

    def take(self, amount: float = 1.0) -> float:
        """Take `amount` tokens and return 0.0.

        If there are too few, take none and return the seconds until there are enough.
        """
        now = self._clock.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if amount > self._left + 1e-9:
            return (amount - self._left) / self._per_second
        self._left = max(self._left - amount, 0.0)
        return 0.0


class RequestRates:
    """A token bucket for each recently used key. Dropping a bucket equals filling it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[KeyLimits, TokenBucket]] = OrderedDict()

    def count(self, key_id: str, limits: KeyLimits) -> None:
        """Count one request of a key; new `limits` start a new bucket. Raises TooManyRequests if it is empty."""
        known, bucket = self._buckets.pop(key_id, (None, None))
        if bucket is None or known != limits:
            bucket = TokenBucket(limits.requests_per_minute / 60, limits.burst, self._clock)
        self._buckets[key_id] = limits, bucket
        if len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        seconds = bucket.take()
        if seconds > 0:
            raise TooManyRequests(
                f"this key may send {limits.requests_per_minute:g} requests a minute; come again in {seconds:.2f} s",
                seconds,
            )


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


OPERATOR_TENANT = "default"  # its admins run the cluster; they do not see into other tenants


class Role(StrEnum):
    """The role of a user: an admin manages the tenant's users, and also what other users have."""

    ADMIN = "admin"
    MEMBER = "member"
