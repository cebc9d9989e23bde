from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from palestra.config import JobConfig
from palestra.errors import InvalidSampler
from palestra.learner.samplers import History, PlayedGroup, Shuffled, TaskPool, TaskSampler
from palestra.learner.task_source import TaskSource
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import PolicyVersion, VersionSpan
from palestra.types.records import Task
from palestra.types.states import GroupState
from unit.building import make_chat

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
    config = JobConfig.model_validate({"rollout": {"group_size": 2, "groups_per_step": 2} | rollout})
    return TaskSource(store.groups, config, config.players, {"": sampler})


def mixed(store, make=Shuffled, weigh="groups", **rollout) -> TaskSource:
    """Two environments, of which the first has two thirds of the groups."""
    environments = [{"id": "a", "name": "arithmetic", "weight": 2}, {"id": "b", "name": "calculator"}]
    settings = {"rollout": {"group_size": 2, "groups_per_step": 3} | rollout, "tasks": {"weigh": weigh}}
    config = JobConfig.model_validate(settings | {"environments": environments})
    pools = {name: TaskPool([Task(task_id=f"{name}/{n}", data={}) for n in range(6)]) for name in "ab"}
    return TaskSource(store.groups, config, config.players, {name: make(pools[name], 1) for name in "ab"})


def names_of(tasks) -> str:
    return "".join(group[0].task_id[0] for group in tasks.values())


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
    with pytest.raises(InvalidSampler, match=r"Listening.*1.*11.*2"):
        await source(store, Listening(TaskPool(TASKS), 0)).tasks(11, range(2))


# Several environments


async def test_quotas_are_exact_and_a_replacement_plays_the_same_environment(store):
    tasks = mixed(store)
    first = await tasks.tasks(1, range(3))
    assert sorted(names_of(first)) == ["a", "a", "b"]
    await store.groups.register_many("train", 1, first, 2)
    lost = names_of(first).index("b")
    await store.groups.settle("train", {lost: GroupState.DROPPED})
    again = await mixed(store).tasks(1, [3])
    assert names_of(again) == "b"
    assert again[3] != first[lost]
    await store.groups.register_many("train", 1, again, 2)
    following = await mixed(store).tasks(2, range(4, 7))
    assert sorted(names_of(following)) == ["a", "a", "b"]
    named = [group[0].task_id for each in (first, again, following) for group in each.values()]
    assert len(set(named)) == len(named), "each environment goes through its own tasks in order"


async def test_the_tasks_of_a_step_are_the_same_if_they_are_registered_one_by_one_with_restarts_between(store):
    whole = await mixed(store).tasks(1, range(3))
    for index in range(3):
        one = await mixed(store).tasks(1, [index])
        assert one == {index: whole[index]}
        await store.groups.register_many("train", 1, one, 2)


async def test_each_sampler_hears_of_its_own_environment_alone(store):
    heard: dict[str, Listening] = {}

    def make(pool, seed):
        return heard.setdefault(pool[0][0].task_id[0], Listening(pool, seed))

    tasks = mixed(store, make)
    await play(store, 1, await tasks.tasks(1, range(3)))
    await tasks.tasks(2, range(3, 6))
    assert [group.position for group in heard["a"].heard[-1][1].results] == [1, 2]
    assert heard["a"].heard[-1][1].before == 2
    assert heard["b"].heard[-1] == (
        2,
        History(results=(PlayedGroup(position=1, step=1, rewards=(1.0, 0.0)),), before=1),
    )


async def test_by_tokens_an_environment_with_long_replies_gets_fewer_groups(store):
    tasks, played = mixed(store, weigh="tokens"), ""
    for step in range(1, 9):
        given = await tasks.tasks(step, range(3 * step - 3, 3 * step))
        await store.groups.register_many("train", step, given, 1)
        for _ in given:
            claim = await store.episodes.claim("w", f"{step}-{len(played)}", None)
            played += claim.task.task_id[0]
            length = 40 if played[-1] == "a" else 10
            chat = make_chat(claim.episode_id, versions=(VersionSpan(PolicyVersion(0, 0), length),))
            await store.calls.append(chat)
            await store.episodes.end(claim.episode_id, claim.fence, EpisodeEnd(rewards={"agent": 1.0}))
        await store.groups.settle("train", dict.fromkeys(given, GroupState.READY))
    tokens = {"a": 40 * played.count("a"), "b": 10 * played.count("b")}
    assert abs(tokens["a"] / sum(tokens.values()) - 2 / 3) < 0.1
