"""The groups of a step: registered, waited for, and replaced if too many of their episodes were lost.

All state is in the store: nothing is queued in memory, so that a restart finds every episode that was handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from palestra.config import RolloutConfig
from palestra.database import WAKE_SECONDS
from palestra.errors import EngineFailure, EpisodesLost, PalestraError
from palestra.rollout.result import Termination
from palestra.store import RunStore
from palestra.types.progress import GroupRecord
from palestra.types.records import EpisodeRecord, Task
from palestra.types.states import REPLACED, EpisodeState, GroupState

OPEN = (EpisodeState.REGISTERED, EpisodeState.CLAIMED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The complete groups of a step.

    Attributes:
        episode_ids: completed episodes that are fresh enough, in canonical order.
        dropped: number of groups that lost too many episodes.
        skipped: number of groups that had nothing to teach and were replaced.
        discarded: number of discarded episodes in the complete groups.
        stale: number of episodes that were played with too old a policy, and registered again.
    """

    episode_ids: tuple[str, ...]
    dropped: int
    skipped: int
    discarded: int
    stale: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Which groups of a step are replaced because nothing can be learned from them.

    Whether a group is replaced depends on the groups before it in canonical order, and not on who was played first, so
    that the same episodes give the same manifest.

    Attributes:
        teaches: returns whether completed episodes, by their ids, have anything to learn from.
        most: how many groups of a step may be replaced for that reason.
    """

    teaches: Callable[[Sequence[str]], Awaitable[bool]]
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEpisodes:
    """A group as it is now, with its episodes in order of their sample index."""

    record: GroupRecord
    episodes: tuple[EpisodeRecord, ...]

    @property
    def is_open(self) -> bool:
        """Return whether an episode of the group may still be completed."""
        return any(episode.state in OPEN for episode in self.episodes)

    @property
    def completed(self) -> list[str]:
        """Return the ids of the group's episodes that have a reward."""
        return [episode.episode_id for episode in self.episodes if episode.state is EpisodeState.COMPLETED]

    @property
    def discarded(self) -> int:
        """Return the number of the group's episodes that were discarded."""
        return sum(episode.state is EpisodeState.DISCARDED for episode in self.episodes)


async def gather_groups(
    store: RunStore,
    config: RolloutConfig,
    tasks_of: Callable[[int], Sequence[Task]],
    step: int,
    last_step: int,
    versions: Mapping[str, int],
    dynamic: DynamicSampling | None = None,
) -> Gathered:
    """Wait until `groups_per_step` groups of a step are complete, and return their episodes.

    Groups of the steps up to `last_step` are registered as well, as far as `max_open_buckets` allows, and played
    meanwhile. Groups that were registered before a restart are used, so that no completed episode is lost.

    Args:
        tasks_of: returns the tasks that the episodes of a group play in turn, by the group's index.
        last_step: the last step whose episodes may be played now.
        versions: n of each policy that will be trained, by name. An episode with a token of one of them that is older
            than `max_staleness` allows is not used, and registered again. What other policies said is never stale.
        dynamic: replaces groups that have nothing to teach; None: such groups are part of the step.

    Raises:
        EpisodesLost, EngineFailure: group after group was lost; training on the rest would hide the failure.
    """
    oldest = {policy: n - config.max_staleness for policy, n in versions.items()}
    while True:
        seen = store.groups.settled.count
        waiting = await _register(store, config, tasks_of, range(step, last_step + 1))
        discarded = await store.groups.discarded("train")
        await _settle_all(store, config, await _buckets(store, step), oldest, dynamic)
        buckets = await _buckets(store, step)
        dropped = sum(bucket.record.state is GroupState.DROPPED for bucket in buckets)
        if dropped > 2 * config.groups_per_step:
            played = sum(len(bucket.completed) + bucket.discarded for bucket in buckets)
            raise _lost(step, played, await store.groups.discard_reasons("train", step))
        ready = [bucket for bucket in buckets if bucket.record.state is GroupState.READY]
        if len(ready) == config.groups_per_step:
            completed = [name for bucket in ready for name in bucket.completed]
            stale = await _stale(store, completed, oldest)
            return Gathered(
                episode_ids=tuple(name for name in completed if name not in stale),
                dropped=dropped,
                skipped=sum(bucket.record.state is GroupState.SKIPPED for bucket in buckets),
                discarded=sum(bucket.discarded for bucket in ready),
                stale=len(stale),
            )
        if any(bucket.is_open for bucket in buckets):
            if waiting:  # a group that is done makes room for another
                await store.groups.settled.wait(WAKE_SECONDS, seen)
            else:
                await store.groups.wait_settled("train", step, discarded)


async def _buckets(store: RunStore, step: int) -> list[GroupEpisodes]:
    """Return the groups of a step in canonical order."""
    found = await store.groups.of_step("train", step)
    return [GroupEpisodes(record=record, episodes=tuple(episodes)) for record, episodes in found]


async def _register(
    store: RunStore, config: RolloutConfig, tasks_of: Callable[[int], Sequence[Task]], steps: range
) -> bool:
    """Register the missing groups of these steps; return whether one of them has to wait for another to end."""
    room = None
    if config.max_open_buckets is not None:
        room = config.max_open_buckets - await store.groups.number_open("train")
    for due in steps:
        alive = sum(bucket.record.state not in REPLACED for bucket in await _buckets(store, due))
        for _ in range(config.groups_per_step - alive):
            if room is not None and room <= 0:
                return True
            index = await store.groups.next_index("train")
            first, *others = tasks_of(index)
            await store.groups.register("train", index, due, first, config.group_size, others)
            room = None if room is None else room - 1
    return False


async def _settle_all(
    store: RunStore,
    config: RolloutConfig,
    buckets: Sequence[GroupEpisodes],
    oldest: Mapping[str, int],
    dynamic: DynamicSampling | None,
) -> None:
    """Settle the groups of a step that are complete: with dynamic sampling only up to the first one that is not."""
    skipped = sum(bucket.record.state is GroupState.SKIPPED for bucket in buckets)
    for bucket in buckets:
        if bucket.record.state is not GroupState.OPEN:
            continue
        if not bucket.is_open:
            left = dynamic if dynamic is not None and skipped < dynamic.most else None
            state = await _settle(store, config, bucket, oldest, left)
            skipped += state is GroupState.SKIPPED
        else:
            state = GroupState.OPEN
        if state is GroupState.OPEN and dynamic is not None:
            return


async def _settle(
    store: RunStore,
    config: RolloutConfig,
    bucket: GroupEpisodes,
    oldest: Mapping[str, int],
    dynamic: DynamicSampling | None,
) -> GroupState:
    """Make a complete group READY, DROPPED or SKIPPED, unless some of its episodes have to be played again."""
    record = bucket.record
    stale = await _stale(store, bucket.completed, oldest)
    fresh = len(bucket.completed) - len(stale)
    again = config.group_size - fresh - bucket.discarded
    if stale and again > 0:
        names = sorted(stale)[-again:]
        await store.groups.register_again("train", record.group_index, names)
        for name in names:
            await store.log.add_event("episode_stale", {"episode_id": name, "step": record.step})
        return GroupState.OPEN
    following = GroupState.READY if fresh >= config.min_group_size else GroupState.DROPPED
    if following is GroupState.READY and dynamic is not None:
        used = [name for name in bucket.completed if name not in stale]
        following = GroupState.READY if await dynamic.teaches(used) else GroupState.SKIPPED
    await store.groups.settle("train", record.group_index, following)
    if following in REPLACED:
        event = f"group_{following.value}"
        await store.log.add_event(event, {"group_index": record.group_index, "step": record.step})
    return following


async def _stale(store: RunStore, episode_ids: Sequence[str], oldest: Mapping[str, int]) -> set[str]:
    """Return the episodes with a token of a policy of `oldest` that was sampled before that version of it."""
    found = await store.calls.oldest_tokens(episode_ids, tuple(oldest))
    return {name for name, by_policy in found.items() if any(n < oldest[policy] for policy, n in by_policy.items())}


def _lost(step: int, played: int, reasons: Sequence[str]) -> PalestraError:
    """Return the error that says why most of the lost episodes of a step were discarded."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    kind, number = kinds.most_common(1)[0]
    example = " ".join(next(reason for reason in reasons if reason.partition(":")[0] == kind).split())
    # A kind of ours says less than what follows it; the name of an exception belongs to its text.
    said = example.partition(": ")[2] if kind in [*Termination] and ": " in example else example
    which = f"all {number}" if number == played else f"{number} of {played}"
    how = "have no reward" if kind == Termination.NOT_SCORED else "failed"
    text = (
        f"{which} episodes of step {step} {how}: {said:.300}; "
        "`palestra episodes RUN --state discarded` has the reason of each"
    )
    return EngineFailure(text) if kind == Termination.ENGINE_FAILED else EpisodesLost(text)
