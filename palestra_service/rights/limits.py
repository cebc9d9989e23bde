"""The limits of one key, and the token bucket that enforces its request rate on a monotonic clock."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from palestra.errors import InvalidRequest, TooManyRequests
from palestra.types.clock import Clock

MOST_BUCKETS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """The limits of one key.

    Attributes:
        requests_per_minute: sustained rate.
        burst: requests that may arrive at the same moment.
        open_jobs: unfinished jobs of its user.
        body_bytes: of one request.
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
        """Count one request of a key.

        Args:
            limits: a change starts a new bucket.

        Raises:
            TooManyRequests: the error says how long to wait.
        """
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
