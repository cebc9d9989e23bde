"""The leases of workers on episodes, in memory: a restart gives every live lease a full period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest

from palestra.errors import EpisodeLeaseExpired, PayloadTooLarge
from palestra.types.clock import Clock
from palestra.types.wire import EpisodeHolder

MOST_REFUSALS = 20  # different names that are counted for one lease; clients choose the fields


@dataclass(slots=True)
class Lease:
    """The lease of one claimed episode. Times are monotonic seconds.

    Attributes:
        deadline: the latest expiry, never moved.
        claimed_at: after a restart, the time of the restart.
        held: running calls; while there are any, the lease does not expire, because the server is what delays the
            worker.
        picture_bytes: added to the run's pictures under it.
    """

    fence: int
    seconds: float
    expires_at: float
    deadline: float
    worker_id: str
    claimed_at: float
    held: int = 0
    picture_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class LeaseBook:
    """The leases of all claimed episodes, by episode id."""

    def __init__(self, clock: Clock, timeout_seconds: float) -> None:
        self._clock, self._max = clock, timeout_seconds
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def _present(self, episode_id: str, fence: int) -> Lease | None:
        """Return a lease if it is the episode's present one."""
        lease = self._leases.get(episode_id)
        return lease if lease is not None and lease.fence == fence else None

    def grant(self, episode_id: str, fence: int, seconds: float, worker_id: str = "") -> None:
        """Start a lease; restart the period of a known one."""
        if not self.renew(episode_id, fence):
            now = self._clock.monotonic()
            self._leases[episode_id] = Lease(fence, seconds, now + seconds, now + self._max, worker_id, now)

    def renew(self, episode_id: str, fence: int) -> bool:
        """Restart the period of a lease; return False if it is not the episode's present lease."""
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            return False
        lease.expires_at = self._clock.monotonic() + lease.seconds
        return True

    def granted_since(self, episode_id: str, fence: int, moment: float) -> bool:
        """Return whether a lease was granted by this process after a moment, in monotonic seconds, and is not over."""
        lease = self._present(episode_id, fence)
        return lease is not None and lease.claimed_at >= moment

    @contextmanager
    def hold(self, episode_id: str, fence: int) -> Iterator[None]:
        """Keep a lease from expiring during a call, and renew it at the end."""
        lease = self.begin_hold(episode_id, fence)
        try:
            yield
        finally:
            self.end_hold(lease)

    def begin_hold(self, episode_id: str, fence: int) -> Lease | None:
        """Keep a lease from expiring until `end_hold`; None: it is over already."""
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            return None
        lease.held += 1
        return lease

    def end_hold(self, lease: Lease | None) -> None:
        """Let a lease expire again, and restart its period."""
        if lease is not None:
            lease.held -= 1
            lease.expires_at = self._clock.monotonic() + lease.seconds

    def holders(self, limit: int) -> list[EpisodeHolder]:
        """Return the workers of the `limit` episodes that have been silent longest. Thread-safe."""
        now = self._clock.monotonic()
        found = (
            EpisodeHolder(
                episode_id=episode_id,
                worker_id=lease.worker_id,
                claimed_seconds=now - lease.claimed_at,
                heard_seconds=0.0 if lease.held else now - (lease.expires_at - lease.seconds),
            )
            for episode_id, lease in list(self._leases.items())
        )
        return nsmallest(limit, found, key=lambda holder: (-holder.heard_seconds, holder.episode_id))

    @property
    def workers(self) -> set[str]:
        """Return the names of the workers that hold episodes."""
        return {lease.worker_id for lease in self._leases.values()}

    def drop(self, episode_id: str, fence: int) -> None:
        """Remove the lease of an episode that ended or was given back."""
        if self._present(episode_id, fence) is not None:
            del self._leases[episode_id]

    @contextmanager
    def charge_picture(self, episode_id: str, fence: int, most: int, size: int) -> Iterator[None]:
        """Charge a picture to a lease, unless the block raises; one thread at a time. Raises EpisodeLeaseExpired if it
        is not the episode's present lease. Raises PayloadTooLarge if the total would exceed `most`.
        """
        lease = self._present(episode_id, fence)
        if lease is None:
            raise EpisodeLeaseExpired(
                f"episode {episode_id} has ended or was given back, and takes no picture any more"
            )
        if lease.picture_bytes + size > most:
            raise PayloadTooLarge(
                f"episode {episode_id} has added {lease.picture_bytes:,} of {most:,} bytes of pictures, and this one "
                f"has {size:,} more"
            )
        lease.picture_bytes += size
        try:
            yield
        except BaseException:
            lease.picture_bytes -= size
            raise

    def add_refusal(self, episode_id: str, fence: int, name: str) -> None:
        """Count a refused model call, if the lease is the episode's present one. After MOST_REFUSALS different names,
        others share one.
        """
        lease = self._present(episode_id, fence)
        if lease is not None:
            known = name in lease.refused or len(lease.refused) < MOST_REFUSALS
            lease.refused[name if known else "(others)"] += 1

    def refused(self, episode_id: str, fence: int) -> dict[str, int]:
        """Return the refused model calls of a lease, by name; empty: there are none, or it is over."""
        lease = self._present(episode_id, fence)
        return {} if lease is None else dict(lease.refused)

    def expired(self) -> list[tuple[str, int]]:
        """Return (episode id, fence) of every expired lease."""
        now = self._clock.monotonic()
        return [
            (episode_id, lease.fence)
            for episode_id, lease in self._leases.items()
            if now >= lease.deadline or (now >= lease.expires_at and not lease.held)
        ]
