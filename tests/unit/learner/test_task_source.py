from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from palestra.config import GRPOConfig, Roles, RolloutConfig
from palestra.errors import InvalidSampler
from palestra.learner.samplers import History, PlayedGroup, Shuffled, TaskPool, TaskSampler
from palestra.learner.task_source import TaskSource
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.records import Task
from palestra.types.states import GroupState

TASKS = [Task(task_id=str(n), data={"group_id": n // 2}) for n in range(12)]


class Listening(TaskSampler):
    """Keeps the histories that it gets; plays the tasks from the position `step` on."""

    def __init__(self, pool: TaskPool, seed: int) -> None:
        super().__init__(pool, seed)
        self.heard: list[tuple[int, History]] = []
        self.threads: set[int] = set()

    def tasks(self, step: int, history: History) -> Iterator[int]:
        self.heard.append((step, history))
        self.threads.add(threading.get_ident())
        yield from range(step, len(self.pool))


def source(store, sampler: TaskSampler, **rollout) -> TaskSource:
    config = RolloutConfig.model_validate({"group_size": 2, "groups_per_step": 2} | rollout)
    roles = Roles(default="policy", named={}, frozen=frozenset())
    return TaskSource(store.groups, config, sampler, roles, GRPOConfig())


async def play(store, step: int, given, rewards=(1.0, 0.0), state=GroupState.READY) -> None:
    """Register groups and play their episodes; a reward of None discards one."""
    await store.groups.register_many("train", step, given, len(rewards))
    for index in given:
        for reward in rewards:
            claim = await store.episodes.claim("w", f"{index}-{len(given)}-{asyncio.get_running_loop().time()}", None)
            name = claim.episode_id
            if reward is None:
                await store.episodes.abort(name, claim.fence, "broken", discard=True)
            else:
                await store.episodes.end(name, claim.fence, EpisodeEnd(rewards={"agent": reward}))
        await store.groups.settle("train", {index: state})


async def test_the_plain_order_is_read_in_a_thread_and_goes_on_after_a_restart(store):
    pool = TaskPool(TASKS)
    order = Shuffled(pool, 5)
    expected = [pool[order.position(n)] for n in range(5)]
    tasks = source(store, Shuffled(pool, 5))
    first = await tasks.tasks(1, range(2))
    await play(store, 1, first)
    assert list(first.values()) == expected[:2]
    replaced = await tasks.tasks(1, [2])
    await play(store, 1, replaced, (0.0, 0.0), GroupState.SKIPPED)
    after = await source(store, Shuffled(pool, 5)).tasks(2, range(3, 5))
    assert [*replaced.values(), *after.values()] == expected[2:]
    sampler = Listening(pool, 0)
    await source(store, sampler).tasks(2, [3])
    assert threading.get_ident() not in sampler.threads


async def test_the_history_has_what_was_over_for_certain_and_is_the_same_after_a_restart(store):
    sampler = Listening(TaskPool(TASKS), 0)
    tasks = source(store, sampler, max_staleness=1)
    await play(store, 1, await tasks.tasks(1, range(2)))
    await play(store, 2, await tasks.tasks(2, range(2, 4)), (1.0, None))
    await play(store, 1, await tasks.tasks(1, [4]), (0.5, 0.25))
    await store.groups.register_many("train", 3, await tasks.tasks(3, range(5, 7)), 2)
    heard = dict(sampler.heard)
    assert heard[1] == History(before=2)
    assert heard[2] == History(underway=(1, 2), before=2)
    results = [
        PlayedGroup(position=1, step=1, rewards=(1.0, 0.0)),
        PlayedGroup(position=2, step=1, rewards=(1.0, 0.0)),
        PlayedGroup(position=3, step=1, rewards=(0.5, 0.25)),
    ]
    assert heard[3] == History(results=tuple(results), underway=(2, 3), before=5)
    assert sampler.heard[0] == (1, History()), "of the first groups"
    again = Listening(TaskPool(TASKS), 0)
    await source(store, again, max_staleness=1).tasks(3, [7])
    assert again.heard == [(3, heard[3])]
    await tasks.tasks(2, [7])  # a group is lost, when results of later steps are known
    assert sampler.heard[-1][1].results == ()


async def test_a_group_of_several_tasks_is_one_position(store):
    sampler = Listening(TaskPool(TASKS, "group_id", 2), 0)
    tasks = source(store, sampler)
    first = await tasks.tasks(1, range(2))
    assert [[task.task_id for task in group] for group in first.values()] == [["2", "3"], ["4", "5"]]
    await play(store, 1, first)
    await tasks.tasks(2, range(2, 4))
    assert [group.position for group in sampler.heard[-1][1].results] == [1, 2]


async def test_a_sampler_without_enough_tasks_fails_with_its_name(store):
    with pytest.raises(InvalidSampler, match=r"Listening.* ends after task 1 of step 11, and 2"):
        await source(store, Listening(TaskPool(TASKS), 0)).tasks(11, range(2))
