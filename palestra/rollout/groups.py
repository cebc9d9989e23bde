"""The groups of a job, as a view of its store: nothing is queued twice, and a restart finds all that was handed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.config import RolloutConfig
from palestra.database import WAKE_SECONDS
from palestra.errors import EngineFailure
from palestra.ledger import RunStore
from palestra.schemas.protocols import GroupRecord
from palestra.schemas.records import Episode, Task
from palestra.schemas.states import EpisodeState, GroupState

OPEN = (EpisodeState.REGISTERED, EpisodeState.CLAIMED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The ready groups of a step."""

    episode_ids: tuple[str, ...]  # completed and fresh, in canonical order
    dropped: int  # groups that lost too many episodes
    discarded: int  # episodes of the ready groups that were discarded
    stale: int  # episodes that were played with too old a policy, and registered anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A group as it is now."""

    record: GroupRecord
    episodes: tuple[Episode, ...]  # in order of their sample index

    @property
    def group_key(self) -> int:
        """What its episodes have in common: the group's index, given when they were registered."""
        return self.record.group_index

    @property
    def is_open(self) -> bool:
        """Whether an episode of it may still be completed."""
        return any(episode.state in OPEN for episode in self.episodes)

    @property
    def completed(self) -> list[str]:
        """Ids of the episodes that have a reward."""
        return [episode.episode_id for episode in self.episodes if episode.state is EpisodeState.COMPLETED]

    @property
    def discarded(self) -> int:
        """Episodes that were given up."""
        return sum(episode.state is EpisodeState.DISCARDED for episode in self.episodes)


class GroupQueueManager:
    """Registers the groups of a step and of those to come, waits for them, and replaces what was lost."""

    def __init__(self, store: RunStore, config: RolloutConfig, task_of: Callable[[int], Task]) -> None:
        """`task_of` gives the task of a group, by its index; sizes and limits are in `config`."""
        self._store, self._config, self._task_of = store, config, task_of

    @property
    def group_size(self) -> int:
        """Episodes of a group."""
        return self._config.group_size

    @property
    def max_open_buckets(self) -> int | None:
        """Groups that may be open at the same time; None: all that are due."""
        return self._config.max_open_buckets

    async def buckets(self, step: int) -> list[Bucket]:
        """A step's groups in canonical order."""
        found = await self._store.groups.of_step("train", step)
        return [Bucket(record=record, episodes=tuple(episodes)) for record, episodes in found]

    async def gather(self, step: int, last_step: int, version: int) -> Gathered:
        """Wait until `groups_per_step` groups of this step are ready.

        Those of the steps up to `last_step` are registered as well, as far as `max_open_buckets` allows, and played
        meanwhile. What was registered before a restart is used, so nothing that was handed in is lost.

        Args:
            step: the step to gather.
            last_step: the last step whose episodes may be played now.
            version: n of the policy that will be trained. An episode with a token that is older than `max_staleness`
                allows is not used, and registered anew.

        Raises:
            EngineFailure: group after group failed; training on what is left would hide it.
        """
        oldest = version - self._config.max_staleness
        while True:
            seen = self._store.groups.settled.count
            waiting = await self._register(step, last_step)
            discarded = await self._store.groups.discarded("train")
            for bucket in await self.buckets(step):
                await self._settle(bucket, oldest)
            buckets = await self.buckets(step)
            dropped = sum(bucket.record.state is GroupState.DROPPED for bucket in buckets)
            if dropped > 2 * self._config.groups_per_step:
                lost = self.group_size - self._config.min_group_size
                why = _most_common(await self._store.groups.discard_reasons("train", step))
                raise EngineFailure(
                    f"{dropped} groups of step {step} lost more than {lost} of their episodes{why}; see "
                    "`palestra episodes` for the reasons"
                )
            ready = [bucket for bucket in buckets if bucket.record.state is GroupState.READY]
            if len(ready) == self._config.groups_per_step:
                completed = [name for bucket in ready for name in bucket.completed]
                stale = await self._stale(completed, oldest)
                return Gathered(
                    episode_ids=tuple(name for name in completed if name not in stale),
                    dropped=dropped,
                    discarded=sum(bucket.discarded for bucket in ready),
                    stale=len(stale),
                )
            if any(bucket.is_open for bucket in buckets):
                if waiting:  # a group that is done makes room for another
                    await self._store.groups.settled.wait(WAKE_SECONDS, seen)
                else:
                    await self._store.groups.wait_settled("train", step, discarded)

    async def _register(self, step: int, last_step: int) -> bool:
        """Register what is due; returns whether something waits for room."""
        room = None
        if self.max_open_buckets is not None:
            room = self.max_open_buckets - await self._store.groups.number_open("train")
        for due in range(step, last_step + 1):
            alive = sum(bucket.record.state is not GroupState.DROPPED for bucket in await self.buckets(due))
            for _ in range(self._config.groups_per_step - alive):
                if room is not None and room <= 0:
                    return True
                index = await self._store.groups.next_index("train")
                await self._store.groups.register("train", index, due, self._task_of(index), self.group_size)
                room = None if room is None else room - 1
        return False

    async def _settle(self, bucket: Bucket, oldest: int) -> None:
        """READY, or DROPPED, when no episode of it is open and none has to be played again."""
        if bucket.record.state is not GroupState.OPEN or bucket.is_open:
            return
        record = bucket.record
        stale = await self._stale(bucket.completed, oldest)
        fresh = len(bucket.completed) - len(stale)
        again = self.group_size - fresh - bucket.discarded
        if stale and again > 0:
            await self._store.groups.register_again("train", record.group_index, again)
            for name in sorted(stale)[-again:]:
                await self._store.log.add_event("episode_stale", {"episode_id": name, "step": record.step})
            return
        following = GroupState.READY if fresh >= self._config.min_group_size else GroupState.DROPPED
        await self._store.groups.settle("train", record.group_index, following)
        if following is GroupState.DROPPED:
            await self._store.log.add_event("group_dropped", {"group_index": record.group_index, "step": record.step})

    async def _stale(self, episode_ids: Sequence[str], oldest: int) -> set[str]:
        """Those with a token that was sampled before version `oldest`."""
        return {name for name, n in (await self._store.calls.oldest_tokens(episode_ids)).items() if n < oldest}


def _most_common(reasons: Sequence[str]) -> str:
    """Return what ended most of the discarded episodes, as a part of a sentence; empty where there are none.

    A reason begins with its kind, such as `not_scored: ...` or the name of an exception.
    """
    if not reasons:
        return ""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    kind, number = kinds.most_common(1)[0]
    example = " ".join(next(reason for reason in reasons if reason.partition(":")[0] == kind).split())
    how = f"were not scored: {example.partition(': ')[2]}" if kind == "not_scored" else f"failed: {example}"
    return f"; {number} of {len(reasons)} discarded episodes {how:.200}"
