"""The episodes of a job: registered, claimed under a lease, and completed or discarded once."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy import Connection, func, select

from palestra.config import RolloutConfig
from palestra.config.rollout import MAX_LEASE_SECONDS
from palestra.database import Database, Notifier, shielded, to_json
from palestra.errors import Conflict, InvalidRequest
from palestra.store import claiming, lifecycle
from palestra.store.casting import Casting
from palestra.store.claiming import Claim, RolloutSyncLock
from palestra.store.counting import EpisodeCounts, OpenGroups
from palestra.store.leases import LeaseBook
from palestra.store.run_log import insert_event
from palestra.store.tables import episodes
from palestra.types.clock import Clock
from palestra.types.progress import Counts
from palestra.types.records import EpisodeEnd, EpisodeKind, EpisodeRecord, Task
from palestra.types.states import EpisodeState

LeaseOver = Callable[[str, int], None]


class Episodes:
    """Hands out the registered episodes of a job, each to one worker, and takes their rewards.

    A method that changes something returns when the change is on disk. The leases in memory follow the committed
    changes, even if the caller is cancelled meanwhile.

    Attributes:
        available: notified when an episode can be claimed.
        open_groups: told when an episode was completed or discarded.
        on_lease_over: called with (episode id, fence) when an episode was ended or given back.
        recent_rewards: by agent, with the episode's `players`, of the 64 training episodes that were completed last,
            oldest first.
        casting: says who plays the roles that have a pool; None: no role has one.
        judged: whether a judge scores what is trained or validated, before it is complete.
        played: notified when a judge may have something to do.
    """

    def __init__(
        self, db: Database, leases: LeaseBook, rollout: RolloutConfig, clock: Clock, open_groups: OpenGroups
    ) -> None:
        """Start a full lease period for each claimed episode, because time passed without a server."""
        self._db, self.leases, self._rollout, self._clock = db, leases, rollout, clock
        self.available, self.open_groups = Notifier(), open_groups
        self.on_lease_over: list[LeaseOver] = []
        self.recent_rewards: deque[tuple[Mapping[str, float], Mapping[str, str]]] = deque(maxlen=64)
        self.casting: Casting | None = None
        self.judged, self.played = False, Notifier()
        self._counts = EpisodeCounts()
        self._being_claimed = 0  # claims in progress, which have no lease yet
        self.sync_lock = RolloutSyncLock(lambda: len(self.leases) + self._being_claimed, self.available)
        self._limit_reached = False  # whether `max_claimed` prevented a claim since the last end of a lease
        for episode in db.query(lifecycle.live):
            self._grant(episode)

    async def register_adhoc(self, task: Task, request_id: str) -> str:
        """Register an episode outside the schedule, and return its id. It is claimed by id and never trained on.
        `request_id`: a repeated request with the same id gets the same episode.
        """
        episode_id = "adhoc-" + hashlib.sha256(request_id.encode()).hexdigest()[:16]

        def register(connection: Connection) -> None:
            if connection.execute(select(episodes.c.kind).where(episodes.c.episode_id == episode_id)).first():
                return
            number = select(func.coalesce(func.max(episodes.c.group_index), -1) + 1).where(episodes.c.kind == "adhoc")
            connection.execute(
                episodes.insert(),
                {
                    "episode_id": episode_id,
                    "kind": "adhoc",
                    "group_index": connection.execute(number).scalar_one(),
                    "sample_index": 0,
                    "task_id": task.task_id,
                    "task_data": to_json(task.data),
                    "state": EpisodeState.REGISTERED.value,
                },
            )

        await self._db.write(register)
        return episode_id

    @shielded
    async def claim(
        self, worker_id: str, request_id: str, lease_seconds: float | None, episode_id: str | None = None
    ) -> EpisodeRecord | None:
        """Claim the next registered episode, or a named one, under a new lease; None: claim later, after `available` is
        notified.

        Args:
            request_id: a repeated claim with the same id gets the same episode.
            lease_seconds: None: the job's.
            episode_id: None: the next one.

        Raises:
            InvalidRequest: the lease is longer than the job allows.
            ClaimOver: the claim of this `request_id` is over.
            NotFound, IllegalTransition: the named episode does not exist, or is not registered.
        """
        seconds = self._rollout.lease_seconds if lease_seconds is None else lease_seconds
        if seconds > MAX_LEASE_SECONDS:
            raise InvalidRequest(
                f"allow_discard_timeout is {seconds:g} s and this job allows {MAX_LEASE_SECONDS:g} s",
                "allow_discard_timeout",
            )
        claim = Claim(
            worker_id=worker_id,
            request_id=request_id,
            lease_seconds=seconds,
            now=self._clock.now(),
            episode_id=episode_id,
        )
        with self._claiming(1, episode_id) as limit:
            found = await self._db.write(lambda c: self._claim(c, claim, limit), "claim_commit")
            if found is not None:
                self._grant(found)
        return found

    @shielded
    async def claim_many(self, worker_id: str, request_id: str, count: int) -> list[EpisodeRecord]:
        """Claim up to `count` registered episodes in canonical order, in one transaction, with the job's lease."""
        seconds, now = self._rollout.lease_seconds, self._clock.now()

        def claim(connection: Connection) -> list[EpisodeRecord]:
            found: list[EpisodeRecord] = []
            for number in range(count):
                name = f"{request_id}-{number}"
                one = Claim(worker_id=worker_id, request_id=name, lease_seconds=seconds, now=now)
                episode = self._claim(connection, one, limit)
                if episode is None:
                    break
                found.append(episode)
            return found

        with self._claiming(count) as limit:
            claimed = await self._db.write(claim, "claim_commit")
            for episode in claimed:
                self._grant(episode)
        return claimed

    async def claimed_by(self, worker_id: str) -> list[EpisodeRecord]:
        """Return the episodes that a worker holds now."""
        return [episode for episode in await self._db.read(lifecycle.live) if episode.worker_id == worker_id]

    @shielded
    async def end(self, episode_id: str, fence: int, end: EpisodeEnd) -> bool:
        """Complete an episode with its rewards in one transaction; return False if it was already completed with the
        same body.

        Raises:
            Conflict: the episode was completed with another body.
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the episode is not held under this fence.
            InvalidRequest: there are fewer step rewards than TimeSteps with calls, or a reward is not finite.
            CallsRefused: every model call was refused.
        """
        now, kind = self._clock.now(), lifecycle.episode_kind(episode_id)
        if refused := self.leases.refused(episode_id, fence):
            end = replace(end, refused=refused)
        judged = self.judged and kind != "adhoc"
        players = await self._db.write(
            lambda c: lifecycle.complete(c, episode_id, fence, end, now, judged), "end_commit"
        )
        if players is not None:
            if kind == "train" and not judged:
                self.recent_rewards.append((end.rewards, players))
            self._lease_over(episode_id, fence)
            if judged:
                self.played.notify()
            else:
                self.open_groups.ended(episode_id)
        return players is not None

    @shielded
    async def judge(self, episode: EpisodeRecord, rewards: EpisodeEnd | None, reason: str = "") -> None:
        """Complete an episode with the rewards of a judge; without any, discard it, because the judge has failed."""
        if not await self._db.write(lambda c: lifecycle.judge(c, episode.episode_id, rewards, reason)):
            return
        if rewards is not None and episode.kind == "train":
            self.recent_rewards.append((rewards.rewards, episode.players))
        self.open_groups.ended(episode.episode_id)

    @shielded
    async def discard_open(self, kind: EpisodeKind, group_index: int, reason: str) -> None:
        """Discard the episodes of a group that have not been played, and end their leases."""
        now = self._clock.now()
        found = await self._db.write(lambda c: lifecycle.discard_open(c, kind, group_index, reason, now))
        for episode in found:
            self._lease_over(episode.episode_id, episode.fence)
            self.open_groups.ended(episode.episode_id)
        self.played.notify()

    @shielded
    async def abort(self, episode_id: str, fence: int, reason: str, discard: bool, counts: bool = True) -> None:
        """Give an episode back, or discard it. Calls of this lease are not trained on.

        Args:
            discard: never play it again, as is the case after its last attempt anyway.
            counts: whether the attempt is one of the job's `max_attempts`; False if the server caused its end.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the episode is not held under this fence.
        """
        limit, now = self._rollout.max_attempts, self._clock.now()
        given = lifecycle.GivenBack(reason, discard, counts)
        following = await self._db.write(lambda c: lifecycle.give_back(c, episode_id, fence, given, limit, now))
        self._given_back(episode_id, fence, following)

    async def expire_leases(self) -> int:
        """Give back every episode with an expired lease, with an event `lease_expired`, and return their number."""
        expired = 0
        for episode_id, fence in self.leases.expired():
            try:
                await self._expire(episode_id, fence)
            except Conflict:  # its worker ended the episode meanwhile
                self.leases.drop(episode_id, fence)
                continue
            expired += 1
        return expired

    @shielded
    async def _expire(self, episode_id: str, fence: int) -> None:
        """Give one episode back and record the event, in one transaction."""
        limit, now = self._rollout.max_attempts, self._clock.now()

        def give_back(connection: Connection) -> EpisodeState:
            expired = lifecycle.GivenBack("lease expired")
            following = lifecycle.give_back(connection, episode_id, fence, expired, limit, now)
            insert_event(connection, "lease_expired", {"episode_id": episode_id, "fence": fence}, now)
            return following

        self._given_back(episode_id, fence, await self._db.write(give_back))

    async def renew(self, episode_id: str, fence: int) -> None:
        """Restart the period of a lease, as every call of its worker does. Raises EpisodeLeaseExpired, EpisodeEnded or
        NotFound if the worker does not hold the episode.
        """
        if not self.leases.renew(episode_id, fence):
            await self._db.read(lambda c: lifecycle.held(c, episode_id, fence))

    async def get(self, episode_id: str) -> EpisodeRecord:
        """Return one episode."""
        return await self._db.read(lambda c: lifecycle.episode_by_id(c, episode_id))

    async def counts(self) -> Counts:
        """Return the number of episodes in each state, over all kinds."""

        def query(connection: Connection) -> Counts:
            found = self._counts.read(connection).values()
            return Counts(**{state.value: sum(own.get(state.value, 0) for own in found) for state in EpisodeState})

        return await self._db.read(query)

    @contextmanager
    def _claiming(self, count: int, episode_id: str | None = None) -> Iterator[int | None]:
        """Track claims in progress; yield `max_claimed` where it might be exceeded, and 0 during a weight sync."""
        limit = 0 if self.sync_lock.refuses(episode_id) else self._rollout.max_claimed
        self._being_claimed += count
        try:
            yield limit if limit is not None and len(self.leases) + self._being_claimed > limit else None
        finally:
            self._being_claimed -= count
            self.sync_lock.released.notify()

    def _claim(self, connection: Connection, claim: Claim, limit: int | None) -> EpisodeRecord | None:
        """Claim an episode on the writing thread, and remember if the job's `max_claimed` (`limit`) prevented it."""
        found = claiming.take(connection, claim, limit, self.casting)
        if found is None and limit is not None and claiming.number_claimed(connection) >= limit:
            self._limit_reached = True  # the next end of a lease wakes the claims that wait
        return found

    def _grant(self, episode: EpisodeRecord) -> None:
        """Start the lease of a claimed episode, in memory."""
        self.leases.grant(episode.episode_id, episode.fence, episode.lease_seconds, episode.worker_id or "")

    def _given_back(self, episode_id: str, fence: int, following: EpisodeState) -> None:
        """End the lease of an episode that was given back or discarded, and notify waiting tasks."""
        self._lease_over(episode_id, fence)
        if following is EpisodeState.REGISTERED:
            self.available.notify(1)
        else:
            self.open_groups.ended(episode_id)
            self.played.notify()

    def _lease_over(self, episode_id: str, fence: int) -> None:
        """Drop a lease, call `on_lease_over`, and wake claims that a limit may have delayed."""
        if self._limit_reached:
            self._limit_reached = False
            self.available.notify()
        self.leases.drop(episode_id, fence)
        self.sync_lock.released.notify()
        for callback in self.on_lease_over:
            callback(episode_id, fence)
