"""Who holds which episode, and until when. In memory: a restart gives every live lease a full period."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from palestra.schemas.clock import Clock


@dataclass(slots=True)
class Lease:
    """One claimed episode."""

    fence: int
    seconds: float  # its period
    expires_at: float  # monotonic; moved forward by every call
    deadline: float  # monotonic; never moved
    held: int = 0  # calls in flight: while the server itself delays the worker the lease can't run out


class LeaseBook:
    """Leases by episode id."""

    def __init__(self, clock: Clock, max_episode_seconds: float) -> None:
        self._clock, self._max = clock, max_episode_seconds
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, episode_id: str, fence: int, seconds: float) -> None:
        """Start a lease, or start it anew."""
        now = self._clock.monotonic()
        known = self._leases.get(episode_id)
        if known is not None and known.fence == fence:
            self.renew(episode_id, fence)
        else:
            self._leases[episode_id] = Lease(fence, seconds, now + seconds, now + self._max)

    def renew(self, episode_id: str, fence: int) -> bool:
        """Start the period anew; False if this is not the current lease."""
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            return False
        lease.expires_at = self._clock.monotonic() + lease.seconds
        return True

    @contextmanager
    def hold(self, episode_id: str, fence: int) -> Iterator[None]:
        """Keep a lease from running out while a call of it is in flight; renews it at the end."""
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            yield
            return
        lease.held += 1
        try:
            yield
        finally:
            lease.held -= 1
            lease.expires_at = self._clock.monotonic() + lease.seconds

    def drop(self, episode_id: str, fence: int) -> None:
        """The episode is over or given back."""
        lease = self._leases.get(episode_id)
        if lease is not None and lease.fence == fence:
            del self._leases[episode_id]

    def expired(self) -> list[tuple[str, int]]:
        """(episode id, fence) of every lease whose time is over."""
        now = self._clock.monotonic()
        return [
            (episode_id, lease.fence)
            for episode_id, lease in self._leases.items()
            if now >= lease.deadline or (now >= lease.expires_at and not lease.held)
        ]
