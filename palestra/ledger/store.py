"""The run store as the rest of Palestra sees it: asynchronous, every change on disk when it returns.

What each promise needs of SQLite: with `synchronous=NORMAL` a commit survives the death of the process (kill -9),
because it is in the operating system's hands; with `FULL`, the default, it also survives the loss of power.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import sqlalchemy as sa

from palestra.config import RolloutConfig, StoreConfig
from palestra.disk import writing
from palestra.errors import Conflict, InvalidRequest, PalestraError, StoreError
from palestra.ledger import chats, episodes, groups, history
from palestra.ledger.damage import OpenFile, store_error
from palestra.ledger.leases import LeaseBook
from palestra.ledger.tables import migrate
from palestra.ledger.writer import Writer, open_engine
from palestra.schemas.clock import Clock, SystemClock
from palestra.schemas.protocols import Counts, GroupRecord
from palestra.schemas.records import (
    BatchManifest,
    Chat,
    Claim,
    Episode,
    EpisodeKind,
    Event,
    PolicyVersion,
    StepTimes,
    Task,
    Trajectory,
)
from palestra.schemas.states import EpisodeState, GroupState

P = ParamSpec("P")
T = TypeVar("T")
FILE_CHECK_SECONDS = 0.5  # between two looks at whether the file is still there
WAKE_SECONDS = 5.0  # a bell that was missed costs no more than this
LeaseOver = Callable[[str, int], None]


def _whole(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A caller that goes away keeps nothing from being finished: the file and the leases in memory always agree."""

    @wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(method(*args, **kwargs))

    return run


class Bell:
    """Wakes whoever waits. `rings`, read before looking at the store, makes sure that no ring in between is missed."""

    def __init__(self) -> None:
        self.rings = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, timeout_seconds: float, since: int) -> None:
        """Return at the next ring, or at once if it rang after `rings` was `since`, or when the time is over."""
        if self.rings != since:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.ring(1)  # this wake-up was for somebody who will use it
            raise
        finally:
            future.cancel()

    def ring(self, times: int | None = None) -> None:
        """Wake the first `times` that wait, or all."""
        left = len(self._waiting) if times is None else times
        self.rings += 1
        while left > 0 and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                left -= 1


class RunStore:
    """SQLite behind one writer thread; implements `EpisodeStore`."""

    def __init__(self, path: Path, rollout: RolloutConfig, store: StoreConfig, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.path, self._rollout = path, rollout
        self.leases = LeaseBook(self.clock, rollout.max_episode_seconds)
        self.available = Bell()  # rings when an episode can be claimed
        self.settled = Bell()  # rings when an episode was completed or discarded
        self._being_claimed = 0  # claims that have no lease yet
        self._full = False  # somebody claimed in vain since the last end of a lease: `max_claimed` were claimed
        self.on_lease_over: list[LeaseOver] = []
        self.recent_rewards: deque[float] = deque(maxlen=64)  # of training episodes, as they end
        with writing(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
        self._engine = open_engine(path, store.synchronous)
        with self._in_words(), self._engine.begin() as connection:
            migrate(connection)
            for episode in episodes.live(connection):
                self._grant(episode)
        self._file = OpenFile(path)
        self._writer = Writer(self._engine, partial(store_error, path), self._file.problem)
        self._read_engine = open_engine(path, store.synchronous, read_only=True)
        self._reader = ThreadPoolExecutor(1, "palestra-reader")
        self.policy_version = PolicyVersion(0, 0)  # what a claim is told; set by the learner
        self.policy_name = "policy"

    @property
    def commits(self) -> int:
        """Grows with every change."""
        return self._writer.commits

    @property
    def recent_reward(self) -> float | None:
        """Mean of the newest rewards of training episodes; None before the first."""
        return sum(self.recent_rewards) / len(self.recent_rewards) if self.recent_rewards else None

    def close(self) -> None:
        """Finish what was submitted and close the file."""
        self._writer.close()
        self._reader.shutdown()
        self._read_engine.dispose()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def write(self, operation: Callable[[sa.Connection], T], tag: str | None = None) -> T:
        """Run an operation on the writer's connection."""
        return await self._writer.submit(operation, tag)

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """Run a query on a connection of its own; it sees every change that was awaited before."""
        return await self._on_reader(partial(self._query, operation))

    async def _on_reader(self, work: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._reader, work)
        except RuntimeError as error:  # an executor that was shut down takes nothing; requests may outlive the store
            raise StoreError("the store is closed") from error
        return await running

    def _query(self, operation: Callable[[sa.Connection], T]) -> T:
        with self._in_words(), self._read_engine.begin() as connection:
            return operation(connection)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what SQLite raises, and what a damaged record does, into a StoreError."""
        try:
            yield
        except PalestraError:
            raise
        except Exception as error:
            raise store_error(self.path, error) from error

    async def lost(self) -> StoreError:
        """Wait until the file is deleted, moved or replaced, and return what to say; for ever, as a rule.

        Commits notice it before they are acknowledged; this also notices it where nothing is committed.
        """
        while True:
            if (problem := self._writer.over or await self._on_reader(self._file.problem)) is not None:
                return problem
            await asyncio.sleep(FILE_CHECK_SECONDS)  # a file system has no event for it that every kind of it sends

    # Tasks

    async def push_tasks(self, split: str, tasks: Sequence[Task], chunk_id: str) -> int:
        """See `EpisodeStore`."""
        return await self.write(lambda c: history.push_tasks(c, split, tasks, chunk_id))

    async def seal_tasks(self) -> None:
        """See `EpisodeStore`."""
        await self.write(lambda c: history.set_meta(c, "tasks_sealed", "yes"))

    async def tasks_sealed(self) -> bool:
        """Whether no more tasks will come."""
        return await self.read(lambda c: history.get_meta(c, "tasks_sealed")) is not None

    async def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, in order."""
        return await self.read(lambda c: history.read_tasks(c, split))

    # Episodes

    @_whole
    async def register_group(self, kind: EpisodeKind, group_index: int, step: int, task: Task, size: int) -> None:
        """See `EpisodeStore`."""
        added = await self.write(lambda c: groups.register_group(c, kind, group_index, step, task, size))
        self.available.ring(added)

    async def register_adhoc(self, task: Task, request_id: str) -> str:
        """An episode outside the schedule, to be claimed by its id."""
        return await self.write(lambda c: episodes.register_adhoc(c, task, request_id))

    @_whole
    async def claim(
        self, worker_id: str, request_id: str, lease_seconds: float | None, episode_id: str | None = None
    ) -> Claim | None:
        """See `EpisodeStore`."""
        seconds = self._rollout.lease_seconds if lease_seconds is None else lease_seconds
        if seconds > self._rollout.max_lease_seconds:
            raise InvalidRequest(
                f"allow_discard_timeout is {seconds:g} s and this job allows {self._rollout.max_lease_seconds:g} s",
                "allow_discard_timeout",
            )
        now, most = self.clock.now(), self._rollout.max_per_worker
        with self._claims(1) as limit:
            found = await self.write(
                lambda c: self._take(c, worker_id, request_id, seconds, episode_id, now, most, limit), "claim_commit"
            )
            if found is None:
                return None
            self._grant(found)
        return Claim(episode=found, policy=self.policy_name, version=self.policy_version)

    @contextmanager
    def _claims(self, count: int) -> Iterator[int | None]:
        """While `count` are being claimed; gives `max_claimed` where it could be passed, else nobody has to count."""
        limit = self._rollout.max_claimed
        self._being_claimed += count
        try:
            yield limit if limit is not None and len(self.leases) + self._being_claimed > limit else None
        finally:
            self._being_claimed -= count

    def _take(
        self,
        connection: sa.Connection,
        worker_id: str,
        request_id: str,
        seconds: float,
        episode_id: str | None,
        now: float,
        most: int | None,
        limit: int | None,
    ) -> Episode | None:
        """Claim within the job's limit; on the writer's thread."""
        found = episodes.claim(connection, worker_id, request_id, seconds, episode_id, now, most, limit)
        if found is None and limit is not None and episodes.number_claimed(connection) >= limit:
            self._full = True  # whoever claims in vain from here on is woken by the next end of a lease
        return found

    async def claimed_by(self, worker_id: str) -> list[Episode]:
        """What a worker holds."""
        return [episode for episode in await self.read(episodes.live) if episode.worker_id == worker_id]

    @_whole
    async def claim_many(self, worker_id: str, request_id: str, count: int) -> list[Claim]:
        """Up to `count` registered episodes at once, in canonical order, with the job's lease."""
        seconds, now = self._rollout.lease_seconds, self.clock.now()

        def take(connection: sa.Connection) -> list[Episode]:
            found: list[Episode] = []
            for number in range(count):
                name = f"{request_id}-{number}"
                episode = self._take(connection, worker_id, name, seconds, None, now, None, limit)
                if episode is None:
                    break
                found.append(episode)
            return found

        with self._claims(count) as limit:
            claimed = await self.write(take, "claim_commit")
            for episode in claimed:
                self._grant(episode)
        return [Claim(episode=episode, policy=self.policy_name, version=self.policy_version) for episode in claimed]

    @_whole
    async def end(
        self,
        episode_id: str,
        fence: int,
        rewards: Mapping[str, float],
        step_rewards: Sequence[float] | None,
        metadata: Mapping[str, Any],
        step_times: Sequence[StepTimes] | None = None,
    ) -> bool:
        """See `EpisodeStore`."""
        now = self.clock.now()
        first = await self.write(
            lambda c: episodes.end(c, episode_id, fence, rewards, step_rewards, step_times, metadata, now),
            "end_commit",
        )
        if first:
            if episodes.kind_of(episode_id) == "train":
                self.recent_rewards.append(float(sum(rewards.values())))
            self._lease_over(episode_id, fence)
            self.settled.ring()
        return first

    @_whole
    async def abort(self, episode_id: str, fence: int, reason: str, discard: bool, counts: bool = True) -> None:
        """See `EpisodeStore`."""
        limit, now = self._rollout.max_attempts, self.clock.now()
        after = await self.write(
            lambda c: episodes.give_back(c, episode_id, fence, reason, discard, limit, now, counts)
        )
        self._lease_over(episode_id, fence)
        if after.state is EpisodeState.REGISTERED:
            self.available.ring(1)
        else:
            self.settled.ring()

    async def expire_leases(self) -> int:
        """Give back every episode whose lease ran out; returns how many."""
        given_back = 0
        for episode_id, fence in self.leases.expired():
            try:
                await self.abort(episode_id, fence, "lease expired", discard=False)
            except Conflict:  # the worker was quicker: it ended the episode meanwhile
                self.leases.drop(episode_id, fence)
                continue
            given_back += 1
            await self.add_event("lease_expired", {"episode_id": episode_id, "fence": fence})
        return given_back

    def _grant(self, episode: Episode) -> None:
        self.leases.grant(episode.episode_id, episode.fence, episode.lease_seconds, episode.worker_id or "")

    def _lease_over(self, episode_id: str, fence: int) -> None:
        if self._full or self._rollout.max_per_worker is not None:
            self._full = False
            self.available.ring()  # its worker may hold another one of the group now, or anybody another one
        self.leases.drop(episode_id, fence)
        for callback in self.on_lease_over:
            callback(episode_id, fence)

    def hold(self, episode_id: str, fence: int) -> AbstractContextManager[None]:
        """Keep a lease from running out while the server itself is at work for it."""
        return self.leases.hold(episode_id, fence)

    async def renew(self, episode_id: str, fence: int) -> None:
        """Any call of a worker renews its lease.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded, NotFound: the worker does not hold it.
        """
        if not self.leases.renew(episode_id, fence):
            await self.read(lambda c: episodes.held(c, episode_id, fence))

    async def episode(self, episode_id: str) -> Episode:
        """See `EpisodeStore`."""
        return await self.read(lambda c: episodes.read(c, episode_id))

    async def counts(self) -> Counts:
        """Episodes in each state."""
        return await self.read(episodes.counts)

    # Groups

    async def groups_of_step(self, kind: EpisodeKind, step: int) -> list[tuple[GroupRecord, list[Episode]]]:
        """A step's groups in canonical order, each with its episodes."""
        return await self.read(lambda c: groups.of_step(c, kind, step))

    async def settled_of_step(self, kind: EpisodeKind, step: int) -> tuple[int, int]:
        """(settled episodes, all episodes) of the groups of a step that were not dropped."""
        return await self.read(lambda c: groups.settled_of_step(c, kind, step))

    async def discard_reasons(self, kind: EpisodeKind, step: int) -> list[str]:
        """Return why each discarded episode of a step was discarded, dropped groups included."""
        return await self.read(lambda c: groups.discard_reasons(c, kind, step))

    async def discarded(self, kind: EpisodeKind) -> int:
        """How many episodes of this kind were discarded."""
        return await self.read(lambda c: groups.discarded(c, kind))

    async def open_groups(self, kind: EpisodeKind) -> int:
        """Groups of which an episode may still be completed."""
        return await self.read(lambda c: groups.open_groups(c, kind))

    @_whole
    async def register_again(self, kind: EpisodeKind, group_index: int, count: int) -> None:
        """Add `count` episodes to a group, in the place of some that can't be used."""
        await self.write(lambda c: groups.register_again(c, kind, group_index, count))
        self.available.ring(count)

    async def wait_settled(self, kind: EpisodeKind, step: int, discarded: int) -> None:
        """Return when no episode of a step is open, or another number than `discarded` of this kind is discarded."""
        while True:
            seen = self.settled.rings
            is_open, now = await self.read(lambda c: groups.progress(c, kind, step))
            if not is_open or now != discarded:
                return
            await self.settled.wait(WAKE_SECONDS, seen)

    async def settle_group(self, kind: EpisodeKind, group_index: int, state: GroupState) -> None:
        """A group is READY, or DROPPED."""
        await self.write(lambda c: groups.settle_group(c, kind, group_index, state))

    async def next_group_index(self, kind: EpisodeKind) -> int:
        """One more than the largest in use."""
        return await self.read(lambda c: groups.next_group_index(c, kind))

    # Calls

    def append_chat(self, chat: Chat) -> asyncio.Future[None]:
        """See `EpisodeStore`."""
        return self._writer.submit(partial(chats.append, chat=chat), "chat_commit")

    async def chats(self, episode_id: str, fence: int) -> tuple[Chat, ...]:
        """See `EpisodeStore`."""
        return await self.read(lambda c: chats.of_lease(c, episode_id, fence))

    async def oldest_tokens(self, episode_ids: Sequence[str]) -> dict[str, int]:
        """N of the version with which an episode's oldest token was sampled; those without tokens are left out."""
        return await self.read(lambda c: chats.oldest_tokens(c, episode_ids))

    async def lease(self, episode_id: str, fence: int) -> tuple[Episode, tuple[Chat, ...]]:
        """An episode, and the calls that were recorded under one lease of it; at one look."""
        return await self.read(lambda c: (episodes.read(c, episode_id), chats.of_lease(c, episode_id, fence)))

    async def trajectories(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        """See `EpisodeStore`."""
        return await self.read(lambda c: chats.trajectories(c, episode_ids))

    # History

    async def commit_manifest(self, manifest: BatchManifest) -> None:
        """See `EpisodeStore`."""
        await self.write(lambda c: history.commit_manifest(c, manifest), "manifest_commit")

    async def manifest(self, step: int) -> BatchManifest | None:
        """What a step trains on; None until it is fixed."""
        return await self.read(lambda c: history.read_manifest(c, step))

    async def put_metrics(self, step: int, data: Mapping[str, float]) -> None:
        """Write a step's finished row of metrics."""
        await self.write(lambda c: history.put_metrics(c, step, data))

    async def put_unfinished_metrics(self, data: Mapping[str, float]) -> None:
        """Keep the row of a trained step until `put_metrics` writes it with the step's evaluation."""
        await self.write(lambda c: history.put_unfinished_metrics(c, data))

    async def restore_metrics(self, step: int) -> dict[str, float] | None:
        """Drop the rows of steps after `step`; return that of `step` if it still waits for its evaluation."""
        return await self.write(lambda c: history.restore_metrics(c, step))

    async def metrics(self) -> list[dict[str, float]]:
        """Return all finished rows of metrics, by step."""
        return await self.read(history.read_metrics)

    async def add_event(self, kind: str, data: Mapping[str, Any]) -> Event:
        """See `EpisodeStore`."""
        now = self.clock.now()
        return await self.write(lambda c: history.add_event(c, kind, data, now))

    async def events(self, after: int, limit: int = 500) -> list[Event]:
        """Events with a larger id, oldest first."""
        return await self.read(lambda c: history.read_events(c, after, limit))

    async def meta(self, key: str) -> str | None:
        """A small fact of the run; None where it was never set."""
        return await self.read(lambda c: history.get_meta(c, key))

    async def set_meta(self, key: str, value: str) -> None:
        """Set a small fact of the run."""
        await self.write(lambda c: history.set_meta(c, key, value))


def _make_private(path: Path) -> None:
    """Make the file, or an older one, readable by its owner alone; SQLite gives `-wal` and `-shm` the same mode."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with contextlib.suppress(PermissionError):  # another user's, who decides
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
