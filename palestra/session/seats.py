"""`SeatBook`: the slots of external players ("seats") in all episodes that a job's server plays, and their workers."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from palestra.config import RolloutConfig, SeatsConfig
from palestra.config.rollout import MAX_LEASE_SECONDS
from palestra.database import Notifier
from palestra.errors import (
    Conflict,
    EpisodeEnded,
    EpisodeLeaseExpired,
    InvalidRequest,
    NotFound,
    PalestraError,
    TooManyRequests,
)
from palestra.session.seat_table import SeatTable
from palestra.store import Episodes
from palestra.store.leases import LeaseBook
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage
from palestra.types.records import EpisodeRecord
from palestra.types.seat_wire import SeatAnswer
from palestra.types.states import SEAT_UNCLAIMED, EpisodeState

log = logging.getLogger("palestra.seats")
MOST_OBSERVING = 8  # requests of one worker that observe a seat at the same time; it needs one
MOST_ENDED = 256  # episodes whose seats are remembered after their end, for requests that are sent again


class EpisodeKey(NamedTuple):
    """The lease of an episode's key; exists only after the key's signature was checked."""

    episode_id: str
    fence: int


class SeatKey(NamedTuple):
    """The lease of a player slot. A request's `SeatKey` exists only after its signature was checked.

    Attributes:
        fence: of the episode's lease, which the server holds.
    """

    episode_id: str
    fence: int
    role: str
    seat_fence: int


class SeatClaim(NamedTuple):
    """A claimed player slot."""

    table: SeatTable
    key: SeatKey
    lease_seconds: float


class SeatBook:
    """Assigns workers to player slots of running episodes, and finds the slot of a request.

    The state is in memory only: after a restart the episodes are played from the start, and workers claim again.

    Attributes:
        on_wanted: called when a worker waits for an episode that has not begun.
        on_seat_over: called with (lease, fence, whether it was lost) when a worker's slot ends.
    """

    def __init__(
        self, config: SeatsConfig, rollout: RolloutConfig, episodes: Episodes, clock: Clock, max_observers: int
    ) -> None:
        """Create a book without episodes. Ends of the job's `episodes` close tables; at most `max_observers` requests
        wait for a slot or an observation at a time.
        """
        self.roles = tuple(config.roles)
        self._config, self._rollout, self._episodes, self._clock = config, rollout, episodes, clock
        self._leases = LeaseBook(clock, rollout.timeout_seconds)
        self._tables: dict[tuple[str, int], SeatTable] = {}  # by the lease of the episode, in the order of claims
        self._ended: OrderedDict[tuple[str, int], SeatTable] = OrderedDict()
        self._claims: dict[tuple[str, str], SeatClaim] = {}  # by role and request id, of episodes that are being played
        self._wanting: Counter[str] = Counter()  # claims that wait for any episode, by seat
        self._observers: Counter[SeatKey] = Counter()  # requests that observe a seat, by its key
        self._available = Notifier()
        self._max_observers, self._waiting = max_observers, 0
        self._stopped: PalestraError | None = None
        self.on_wanted: list[Callable[[], None]] = []
        self.on_seat_over: list[Callable[[str, int, bool], None]] = []
        episodes.on_lease_over.append(self._close)

    # What the server's runners do

    def open(self, episode: EpisodeRecord) -> SeatTable:
        """Return the slots of an episode that the server has claimed, creating them at the first call."""
        lease = episode.episode_id, episode.fence
        table = self._tables.get(lease)
        if table is None:
            table = SeatTable(episode, self._config, self._leases, self._rollout.max_attempts, self._clock)
            self._tables[lease] = table
            self._available.notify()
        return table

    @property
    def wanted(self) -> int:
        """Return how many more episodes are needed for all waiting workers."""
        free = {role: sum(table.can_take(role) for table in self._tables.values()) for role in self._wanting}
        return max((self._wanting[role] - free[role] for role in free), default=0)

    def expire(self) -> None:
        """Free slots with expired leases, and end waits that took too long."""
        expired = set(self._leases.expired())
        for table in list(self._tables.values()):
            for role in self.roles:
                for lease, fence in expired:
                    if lease == table.lease_of(role) and table.holds(role, fence):
                        self._leave(table, role, fence)
            for role, fence in table.overdue():
                log.warning(
                    "episode %s: the worker %r of the seat %s has not acted for %g s (seats.wait_seconds)",
                    *(table.episode.episode_id, table.worker_of(role), role, self._config.wait_seconds),
                )
                self._leave(table, role, fence)
            table.check_waiting()
        self._fill_seats()

    def _fill_seats(self) -> None:
        """Give back an episode that cannot continue yet if one of its workers is needed in an earlier one.

        Otherwise two workers might wait for each other in two episodes: one whose partner died, and the partner's
        substitute, for whom another episode was begun before the partner's lease expired.
        """
        tables = list(self._tables.values())
        for place, table in enumerate(tables):
            for role in table.missed:
                later = (other for other in reversed(tables[place + 1 :]) if other.could_spare(role))
                if not self._wanting[role] and (spare := next(later, None)) is not None:
                    name = table.episode.episode_id
                    spare.fail(
                        SEAT_UNCLAIMED, f"its worker of the seat {role} is missed in episode {name}, which is older"
                    )

    def stop(self, reason: PalestraError) -> None:
        """Answer all waiting and later requests with an error."""
        self._stopped = reason
        self.wake()

    def wake(self) -> None:
        """Wake all waiting requests, because the job has ended."""
        self._available.notify()
        for table in self._tables.values():
            table.changed.notify()

    # What workers do

    def check_role(self, role: str) -> None:
        """Raise NotFound unless the slot exists."""
        if role not in self.roles:
            known = ", ".join(map(repr, self.roles))
            raise NotFound(f"this job has no seat {role!r}; its seats are {known}")

    async def claim(
        self,
        role: str,
        worker_id: str,
        request_id: str,
        lease_seconds: float | None,
        episode_id: str | None,
        wait_seconds: float,
        is_over: Callable[[], bool],
    ) -> SeatClaim | None:
        """Give a worker a free slot, in the longest waiting episode first, or wait for one; None: the wait or the job
        is over.

        A repeated `request_id` gets the same slot; `episode_id` limits the claim to this episode; `is_over` says
        whether the job has ended.

        Raises:
            NotFound: the slot or the episode does not exist.
            Conflict: the worker holds another slot of the only episode in which this one is free.
            InvalidRequest: the lease is longer than the job allows.
            TooManyRequests: too many requests wait.
        """
        self.check_role(role)
        seconds = self._lease_seconds(lease_seconds)
        if episode_id is not None:
            await self._episodes.get(episode_id)
        until = self._clock.monotonic() + wait_seconds
        most = max(self._max_observers // (2 * len(self.roles)), 1)  # so that observations of all seats have room
        if self._wanting[role] >= most:
            raise TooManyRequests(f"{self._wanting[role]} claims of the seat {role} wait, which is the limit")
        with self._counted(), self._wanted_of(role if episode_id is None else None):
            while True:
                seen = self._available.count
                if self._stopped is not None:
                    raise self._stopped
                claim = self._take(role, worker_id, request_id, seconds, episode_id)
                left = until - self._clock.monotonic()
                if claim is not None or left <= 0 or is_over():
                    return claim
                await self._available.wait(left, seen)

    def table(self, key: SeatKey) -> SeatTable:
        """Return the table of a slot in a running episode. Raises EpisodeLeaseExpired: the episode is no longer played
        under this lease.
        """
        table = self._tables.get((key.episode_id, key.fence))
        if table is None:
            raise self._gone(key)
        return table

    async def observe(self, key: SeatKey, events_seen: int | None, wait_seconds: float) -> SeatAnswer:
        """Return a player's pending observation, its wait, or the end of the episode. `events_seen` is the number of
        the last event that the worker knows, None: of the last one sent to it; a newer one ends the wait.

        Raises:
            EpisodeLeaseExpired: the worker has lost its slot, or the episode was given back.
            EpisodeEnded: the episode was discarded.
            TooManyRequests: too many requests wait, of this player or of all.
        """
        until = self._clock.monotonic() + wait_seconds
        if (present := self._tables.get((key.episode_id, key.fence))) is not None:
            present.renew(key.role, key.seat_fence)  # also where the request is refused below
        with self._counted(), self._observing(key):
            while (table := self._tables.get((key.episode_id, key.fence))) is not None:
                seen = table.changed.count
                if self._stopped is not None:
                    raise self._stopped
                with table.holding(key.role, key.seat_fence):
                    answer = table.view(key.role, key.seat_fence, events_seen)
                    left = until - self._clock.monotonic()
                    if answer.observation is not None or answer.events or left <= 0:
                        return answer
                    await table.changed.wait(left, seen)
        return await self._outcome(key)

    async def act(self, key: SeatKey, observation_id: str, action: ChatMessage) -> bool:
        """Answer an observation, and return whether the environment gets the action; see `SeatTable.act`.

        Raises EpisodeLeaseExpired: the worker has lost its slot, or the episode was given back. Raises EpisodeEnded:
        the episode was completed without this action, or before the server restarted.
        """
        lease = key.episode_id, key.fence
        table = self._tables.get(lease)
        if table is not None:
            taken = table.act(key.role, key.seat_fence, observation_id, action)
            table.renew(key.role, key.seat_fence)
            return taken
        ended = self._ended.get(lease)
        if ended is not None and ended.was_given(key.role, key.seat_fence, observation_id, action):
            return True
        if ended is not None and ended.was_missed(key.role, key.seat_fence, observation_id):
            return False
        await self._outcome(key)
        raise EpisodeEnded(f"episode {key.episode_id} is completed; observe the seat for its reward")

    def leave(self, key: SeatKey) -> None:
        """Give a slot back. Raises EpisodeLeaseExpired: the worker has lost it."""
        self._leave(self.table(key), key.role, key.seat_fence)

    def _take(
        self, role: str, worker_id: str, request_id: str, seconds: float, episode_id: str | None
    ) -> SeatClaim | None:
        """Return the claim of a repeated request, or a new one; None: no slot is free."""
        known = self._claims.get((role, request_id))
        if known is not None and known.table.holds(role, known.key.seat_fence):
            return known
        both: str | None = None
        for (name, fence), table in self._tables.items():
            if episode_id not in (None, name) or not table.can_take(role):
                continue
            if (other := table.seat_held_by(worker_id)) is not None:
                both = (
                    f"the worker {worker_id!r} holds the seat {other} of episode {name}, and can't play {role} as well"
                )
                continue
            key = SeatKey(name, fence, role, table.take(role, worker_id, seconds))
            claim = self._claims[role, request_id] = SeatClaim(table, key, seconds)
            return claim
        if both is not None:
            raise Conflict(f"{both}; give each worker its own worker_id, or wait until that episode is over")
        return None

    def _leave(self, table: SeatTable, role: str, fence: int) -> None:
        table.leave(role, fence)
        for callback in self.on_seat_over:
            callback(table.lease_of(role), fence, True)
        self._available.notify()

    def _close(self, episode_id: str, fence: int) -> None:
        """Close the table of an episode whose lease is over."""
        lease = episode_id, fence
        table = self._tables.pop(lease, None)
        if table is None:
            return
        closed = table.close(EpisodeLeaseExpired(f"episode {episode_id} was given back"))
        self._claims = {request: claim for request, claim in self._claims.items() if claim.table is not table}
        self._ended[lease] = table
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        for name, seat_fence in closed:
            for callback in self.on_seat_over:
                callback(name, seat_fence, False)
        self._available.notify()

    def was_held(self, episode: EpisodeRecord) -> bool:
        """Return whether a worker held a slot in a finished attempt at an episode."""
        table = self._ended.get((episode.episode_id, episode.fence))
        return table is not None and table.was_held

    async def _outcome(self, key: SeatKey) -> SeatAnswer:
        """Return the end of a player's episode from the store."""
        episode = await self._episodes.get(key.episode_id)
        if episode.fence != key.fence or episode.state in (EpisodeState.REGISTERED, EpisodeState.CLAIMED):
            raise self._gone(key)
        if episode.state is EpisodeState.DISCARDED:
            raise EpisodeEnded(f"episode {key.episode_id} was discarded, so it has no reward; claim again")
        table = self._ended.get((key.episode_id, key.fence))
        if table is not None and not table.was_last(key.role, key.seat_fence):
            raise self._gone(key)
        return SeatAnswer(
            status="over",
            last=() if table is None else table.last_of(key.role),
            reward=(episode.rewards or {}).get(key.role),
            truncated=episode.truncated,
        )

    def _gone(self, key: SeatKey) -> EpisodeLeaseExpired:
        table = self._ended.get((key.episode_id, key.fence))
        why = "the server was started again, perhaps" if table is None or table.failure is None else str(table.failure)
        return EpisodeLeaseExpired(f"episode {key.episode_id} is not played any more ({why}); claim a seat again")

    def _lease_seconds(self, asked: float | None) -> float:
        seconds, most = asked or self._rollout.lease_seconds, MAX_LEASE_SECONDS
        if seconds > most:
            raise InvalidRequest(
                f"allow_discard_timeout is {seconds:g} s and this job allows {most:g} s", "allow_discard_timeout"
            )
        return seconds

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that may wait."""
        if self._waiting >= self._max_observers:
            raise TooManyRequests(f"{self._waiting} requests wait for seats or observations, which is the limit")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def _observing(self, key: SeatKey) -> Iterator[None]:
        """Count a request that observes a slot, so that one player's requests leave capacity for others."""
        if self._observers[key] >= MOST_OBSERVING:
            raise TooManyRequests(f"{MOST_OBSERVING} requests observe this seat at the moment, which is the limit")
        self._observers[key] += 1
        try:
            yield
        finally:
            self._observers[key] -= 1
            if not self._observers[key]:
                del self._observers[key]

    @contextmanager
    def _wanted_of(self, role: str | None) -> Iterator[None]:
        """Count a claim that waits for any episode, so that one begins for it; None: it waits for a certain one."""
        if role is None:
            yield
            return
        self._wanting[role] += 1
        try:
            for callback in self.on_wanted:
                callback()
            yield
        finally:
            self._wanting[role] -= 1
            if not self._wanting[role]:
                del self._wanting[role]
