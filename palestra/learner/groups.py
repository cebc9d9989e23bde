"""Gathers the episodes of one step: registers groups, waits for them, replaces those that lost too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.config import RolloutConfig
from palestra.errors import EngineFailure
from palestra.learner.schedule import TaskOrder
from palestra.ledger import RunStore
from palestra.schemas.protocols import GroupRecord
from palestra.schemas.records import Episode
from palestra.schemas.states import EpisodeState, GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The ready groups of a step."""

    episode_ids: tuple[str, ...]  # completed, in canonical order
    dropped: int  # groups that lost too many episodes
    discarded: int  # episodes of the ready groups that were discarded


async def gather_groups(store: RunStore, order: TaskOrder, step: int, config: RolloutConfig) -> Gathered:
    """Wait until `groups_per_step` groups of this step are ready.

    What was registered before a restart is used, so nothing that was handed in is lost.

    Raises:
        EngineFailure: group after group failed; training on what is left would hide it.
    """
    while True:
        discarded = await store.discarded("train")
        groups = await store.groups_of_step("train", step)
        for record, episodes in groups:
            following = _settled(record, episodes, config.min_group_size)
            if following is not None:
                await store.settle_group("train", record.group_index, following)
                if following is GroupState.DROPPED:
                    await store.add_event("group_dropped", {"group_index": record.group_index, "step": step})
        groups = await store.groups_of_step("train", step)
        dropped = sum(record.state is GroupState.DROPPED for record, _ in groups)
        if dropped > 2 * config.groups_per_step:
            raise EngineFailure(
                f"{dropped} groups of step {step} lost more than {config.group_size - config.min_group_size} of their "
                "episodes; see `palestra episodes` for the reasons"
            )
        alive = [(record, episodes) for record, episodes in groups if record.state is not GroupState.DROPPED]
        if len(alive) < config.groups_per_step:
            index = await store.next_group_index("train")
            for offset in range(config.groups_per_step - len(alive)):
                task = order.task(index + offset)
                await store.register_group("train", index + offset, step, task, config.group_size)
        elif all(record.state is GroupState.READY for record, _ in alive):
            members = [episode for _, episodes in alive for episode in episodes]
            return Gathered(
                episode_ids=tuple(e.episode_id for e in members if e.state is EpisodeState.COMPLETED),
                dropped=dropped,
                discarded=sum(e.state is EpisodeState.DISCARDED for e in members),
            )
        else:
            await store.wait_settled("train", discarded)


async def register_ahead(store: RunStore, order: TaskOrder, steps: range, config: RolloutConfig) -> None:
    """Register the groups of steps to come, so that their episodes are played while earlier steps are trained.

    `steps` begins with the present one. What was not registered before is not sampled from a version older than this.
    """
    for step in steps:
        if not await store.groups_of_step("train", step):
            index = await store.next_group_index("train")
            for group_index in range(index, index + config.groups_per_step):
                await store.register_group("train", group_index, step, order.task(group_index), config.group_size)


def _settled(record: GroupRecord, episodes: Sequence[Episode], min_group_size: int) -> GroupState | None:
    """What an open group becomes; None while an episode of it may still be completed."""
    if record.state is not GroupState.OPEN:
        return None
    if any(e.state in (EpisodeState.REGISTERED, EpisodeState.CLAIMED) for e in episodes):
        return None
    completed = sum(e.state is EpisodeState.COMPLETED for e in episodes)
    return GroupState.READY if completed >= min_group_size else GroupState.DROPPED
