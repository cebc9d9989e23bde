"""Which worker holds which episode, and until when. In memory: a restart gives every live lease a full period."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nsmallest

from palestra.errors import EpisodeLeaseExpired, PayloadTooLarge
from palestra.types.clock import Clock


@dataclass(slots=True)
class Lease:
    """The lease of one claimed episode. Times are monotonic seconds.

    Attributes:
        fence: of the claim.
        seconds: its period.
        expires_at: when it expires; every call moves it forward.
        deadline: when it expires in any case; never moved.
        worker_id: the worker that claimed the episode.
        claimed_at: of the claim; after a restart, of the restart.
        held: calls in flight. While there are any, the server itself delays the worker, so the lease does not expire.
        picture_bytes: that were added to the pictures of the run under it.
    """

    fence: int
    seconds: float
    expires_at: float
    deadline: float
    worker_id: str
    claimed_at: float
    held: int = 0
    picture_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The worker that holds an episode, for people to read.

    Attributes:
        episode_id: of the episode.
        worker_id: of the worker.
        claimed_seconds: since the claim, or since the server started.
        heard_seconds: since the last call or heartbeat of the episode; 0 while a call is in flight.
    """

    episode_id: str
    worker_id: str
    claimed_seconds: float
    heard_seconds: float


class LeaseBook:
    """The leases of all claimed episodes, by episode id."""

    def __init__(self, clock: Clock, max_episode_seconds: float) -> None:
        self._clock, self._max = clock, max_episode_seconds
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, episode_id: str, fence: int, seconds: float, worker_id: str = "") -> None:
        """Start a lease; for a lease that is known already, start its period again."""
        now = self._clock.monotonic()
        known = self._leases.get(episode_id)
        if known is not None and known.fence == fence:
            self.renew(episode_id, fence)
        else:
            self._leases[episode_id] = Lease(fence, seconds, now + seconds, now + self._max, worker_id, now)

    def renew(self, episode_id: str, fence: int) -> bool:
        """Start the period of a lease again; return False if it is not the episode's present lease."""
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            return False
        lease.expires_at = self._clock.monotonic() + lease.seconds
        return True

    @contextmanager
    def hold(self, episode_id: str, fence: int) -> Iterator[None]:
        """Keep a lease from expiring while a call under it is in flight, and renew it at the end."""
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

    def holders(self, limit: int) -> list[Holder]:
        """Return the workers of the `limit` episodes that have been silent for the longest time.

        May be called from other threads than the one that changes the leases.
        """
        now = self._clock.monotonic()
        found = (
            Holder(
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
        """Forget a lease, because its episode was ended or given back."""
        lease = self._leases.get(episode_id)
        if lease is not None and lease.fence == fence:
            del self._leases[episode_id]

    @contextmanager
    def charge_picture(self, episode_id: str, fence: int, most: int, size: int) -> Iterator[None]:
        """Count a picture that the block adds to those of the run under a lease, unless the block raises.

        Entered by one thread at a time.

        Args:
            most: bytes that may be added under one lease.
            size: of the picture, in bytes.

        Raises:
            EpisodeLeaseExpired: it is not the episode's present lease.
            PayloadTooLarge: there would be more than `most`.
        """
        lease = self._leases.get(episode_id)
        if lease is None or lease.fence != fence:
            raise EpisodeLeaseExpired(
                f"episode {episode_id} has ended or was given back, and takes no picture any more"
            )
        if lease.picture_bytes + size > most:
            raise PayloadTooLarge(
                f"episode {episode_id} has added {lease.picture_bytes:,} of {most:,} bytes of pictures, and this one "
                f"has {size:,} more; raise pictures.max_bytes_in_episode"
            )
        lease.picture_bytes += size
        try:
            yield
        except BaseException:
            lease.picture_bytes -= size
            raise

    def expired(self) -> list[tuple[str, int]]:
        """Return (episode id, fence) of every lease that has expired."""
        now = self._clock.monotonic()
        return [
            (episode_id, lease.fence)
            for episode_id, lease in self._leases.items()
            if now >= lease.deadline or (now >= lease.expires_at and not lease.held)
        ]
