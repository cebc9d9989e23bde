from __future__ import annotations

import asyncio

import pytest

from palestra.config import RolloutConfig
from palestra.errors import EngineFailure, EpisodesLost
from palestra.learner import groups
from palestra.learner.groups import DynamicSampling, gather_groups
from palestra.learner.samplers import Shuffled, TaskPool
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import PolicyVersion, VersionSpan
from palestra.types.records import Task
from palestra.types.states import GroupState
from unit.building import make_chat

CONFIG = RolloutConfig(group_size=3, groups_per_step=2)


def in_order(pool: TaskPool):
    """The tasks of groups, in the plain order of a pool."""
    order = Shuffled(pool, 0)

    async def tasks_of(step, indices):
        return {index: pool[order.position(index)] for index in indices}

    return tasks_of


POOL = TaskPool([Task(task_id=str(i), data={}) for i in range(20)])
PLAIN = in_order(POOL)


def task_of(index: int) -> Task:
    """The task of a group, in the plain order."""
    return POOL[Shuffled(POOL, 0).position(index)][0]


def gather(store, step: int, version: int = 0, config: RolloutConfig = CONFIG):
    return gather_groups(store, config, PLAIN, step, step, {"policy": version})


class Players:
    """Plays whatever can be claimed; `fails` says which episodes are discarded."""

    def __init__(self, store, fails=lambda episode_id: False) -> None:
        self.store, self.fails = store, fails
        self.played: list[str] = []

    async def play(self) -> None:
        number = 0
        while True:
            seen = self.store.episodes.available.count
            number += 1
            claim = await self.store.episodes.claim("w", f"{id(self)}-{number}", None)
            if claim is None:
                await self.store.episodes.available.wait(5, seen)
                continue
            name = claim.episode_id
            self.played.append(name)
            if self.fails(name):
                await self.store.episodes.abort(name, claim.fence, "broken", discard=True)
            else:
                await self.store.episodes.end(name, claim.fence, EpisodeEnd(rewards={"agent": 1.0}))


async def gathered(store, fails=lambda _: False, step: int = 1):
    players = Players(store, fails)
    task = asyncio.ensure_future(players.play())
    try:
        return await asyncio.wait_for(gather(store, step), 10), players
    finally:
        task.cancel()


async def test_a_step_is_made_of_full_groups_in_canonical_order(store):
    found, _ = await gathered(store)
    assert found.episode_ids == tuple(f"train-{g:06d}-{s:02d}" for g in range(2) for s in range(3))
    assert (found.dropped, found.discarded) == (0, 0)
    again, _ = await gathered(store, step=2)
    assert again.episode_ids[0] == "train-000002-00"


async def test_groups_get_their_tasks_in_order(store):
    await gathered(store)
    found = await store.groups.of_step("train", 1)
    assert [record.task_id for record, _ in found] == [task_of(0).task_id, task_of(1).task_id]


async def test_a_group_that_lost_few_is_trained_with_its_remainder(store):
    found, _ = await gathered(store, lambda name: name == "train-000000-01")
    assert found.episode_ids == ("train-000000-00", "train-000000-02", *(f"train-000001-0{s}" for s in range(3)))
    assert (found.dropped, found.discarded) == (0, 1)


async def test_a_group_that_lost_too_many_is_replaced_and_counted(store):
    found, players = await gathered(store, lambda name: name.startswith("train-000000") and not name.endswith("02"))
    assert {name[:12] for name in found.episode_ids} == {"train-000001", "train-000002"}
    assert (found.dropped, found.discarded) == (1, 0)
    assert "train-000000-02" in players.played
    assert [e.data for e in await store.log.events(0) if e.kind == "group_dropped"] == [{"group_index": 0, "step": 1}]


async def test_where_group_after_group_fails_the_job_says_so_and_does_not_go_on_for_ever(store):
    with pytest.raises(EpisodesLost, match=r"1.*broken"):
        await gathered(store, lambda _: True)
    # More than twice the two groups of a step were lost: five, or six where the last two are seen at the same time.
    assert await store.groups.next_index("train") in (5, 6)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["not_scored: f returned None"], r"6.*1.*reward"),
        (["environment_failed: f returned [0.5], so"], r"6.*1.*\[0.5\]"),
        (["KeyError: 'a' (a.py:3, in f)", "KeyError: 'b'", "not_scored: None"], r"4.*6.*KeyError.*'a'"),
        (["given back by its worker"], r"6.*1.*back"),
        (["timed_out"], r"6.*1.*timed_out"),
    ],
)
async def test_the_reason_that_most_of_the_lost_episodes_have_is_named(store, reasons, said):
    limited = CONFIG.model_copy(update={"groups_per_step": 1, "max_open_buckets": 1, "group_size": 2})
    gathering = asyncio.ensure_future(gather(store, 1, 0, limited))
    for number in range(6):  # three groups of two
        while (claim := await store.episodes.claim("w", f"c{number}", None)) is None:
            await asyncio.sleep(0)
        reason = reasons[number % len(reasons)]
        await store.episodes.abort(claim.episode_id, claim.fence, reason, discard=True)
    with pytest.raises(EpisodesLost, match=said):
        await asyncio.wait_for(gathering, 10)


async def test_what_was_handed_in_before_a_restart_is_used(store):
    players = Players(store)
    first = asyncio.ensure_future(gather(store, 1))
    while await store.groups.next_index("train") < 2:
        await asyncio.sleep(0)
    claim = await store.episodes.claim("w", "early", None)
    await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 0.5}))
    first.cancel()
    found, players = await gathered(store)
    assert len(found.episode_ids) == 6
    assert claim.episode_id not in players.played
    assert await store.groups.next_index("train") == 2


async def test_groups_of_later_steps_are_registered_and_do_not_hold_up_this_one(store):
    ahead = CONFIG.model_copy(update={"max_staleness": 2})
    gathering = asyncio.ensure_future(gather_groups(store, ahead, PLAIN, 1, 3, {"policy": 0}))
    while await store.groups.next_index("train") < 6:
        await asyncio.sleep(0)
    for number in range(6):  # those of step 1, and of no other
        claim = await store.episodes.claim("w", f"c{number}", None)
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    found = await asyncio.wait_for(gathering, 1)
    assert len(found.episode_ids) == 6
    assert (await store.episodes.counts()).registered == 12


async def test_no_more_groups_are_open_at_once_than_the_job_allows(store):
    limited = CONFIG.model_copy(update={"max_open_buckets": 1, "groups_per_step": 3})
    most, players = [], Players(store)
    register = store.groups.register_many

    async def watched(*arguments):
        await register(*arguments)
        most.append(await store.groups.number_open("train"))

    store.groups.register_many = watched
    playing = asyncio.ensure_future(players.play())
    found = await asyncio.wait_for(gather(store, 1, 0, limited), 10)
    playing.cancel()
    assert (len(most), max(most)) == (3, 1)
    assert len(found.episode_ids) == 9
    assert [record.group_index for record, _ in await store.groups.of_step("train", 1)] == [0, 1, 2]


async def test_an_episode_with_too_old_a_token_is_left_out_and_registered_anew(store):
    """Pacing keeps it from happening; the check at the end keeps it from being trained on."""
    versions = {"train-000000-01": 1}

    class Sampling(Players):
        async def play(self):
            number = 0
            while True:
                seen = self.store.episodes.available.count
                number += 1
                claim = await self.store.episodes.claim("w", f"s{number}", None)
                if claim is None:
                    await self.store.episodes.available.wait(5, seen)
                    continue
                name = claim.episode_id
                for index, n in enumerate((3, versions.get(name, 3))):
                    spans = (VersionSpan(PolicyVersion(0, 3), 1), VersionSpan(PolicyVersion(0, n), 1))
                    await self.store.calls.append(make_chat(name, index=index, versions=spans))
                await self.store.episodes.end(name, 1, EpisodeEnd(rewards={"agent": 1.0}))

    paced = CONFIG.model_copy(update={"max_staleness": 1})
    playing = asyncio.ensure_future(Sampling(store).play())
    found = await asyncio.wait_for(gather(store, 1, 3, paced), 10)
    playing.cancel()
    assert (found.stale, found.dropped, found.discarded) == (1, 0, 0)
    assert found.episode_ids == (
        "train-000000-00",
        "train-000000-02",
        "train-000000-03",
        *(f"train-000001-0{s}" for s in range(3)),
    )
    events = [e.data for e in await store.log.events(0) if e.kind == "episode_stale"]
    assert events == [{"episode_id": "train-000000-01", "step": 1}]
    assert await asyncio.wait_for(gather(store, 1, 3, paced), 10) == found  # after a restart: the same, nothing new


async def test_tokens_of_a_frozen_policy_are_never_stale_and_each_trained_one_has_its_own_version(store):
    await store.groups.register("train", 0, 1, task_of(0), 3)
    for sample, (policy, n) in enumerate([("policy", 4), ("old", 0), ("other", 1)]):
        claim = await store.episodes.claim("w", f"c{sample}", None)
        fresh = (VersionSpan(PolicyVersion(0, 4), 2),)
        await store.calls.append(make_chat(claim.episode_id, versions=fresh))
        spans = (VersionSpan(PolicyVersion(0, n), 2),)
        await store.calls.append(make_chat(claim.episode_id, index=1, policy=policy, versions=spans))
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    one = CONFIG.model_copy(update={"groups_per_step": 1, "max_staleness": 1, "group_size": 3})
    found = await asyncio.wait_for(gather_groups(store, one, PLAIN, 1, 1, {"policy": 5, "other": 2}), 10)
    assert (found.stale, len(found.episode_ids)) == (0, 3)
    for versions, name in (({"policy": 5, "other": 3}, "train-000000-02"), ({"policy": 6}, "train-000000-00")):
        found = await asyncio.wait_for(gather_groups(store, one, PLAIN, 1, 1, versions), 10)
        assert name not in found.episode_ids


# Dynamic sampling


async def sampled(store, teaches, most: int):
    """A step in which the groups of `teaches` have something to teach, and the groups that were asked about."""
    asked = []

    async def ask(trajectories) -> bool:
        asked.append(trajectories[0].episode.group_index)
        return asked[-1] in teaches

    players = Players(store)
    playing = asyncio.ensure_future(players.play())
    dynamic = DynamicSampling(teaches=ask, most=most)
    try:
        found = await asyncio.wait_for(gather_groups(store, CONFIG, PLAIN, 1, 1, {"policy": 0}, dynamic), 10)
    finally:
        playing.cancel()
    return found, asked


def groups_in(found) -> list[int]:
    return sorted({int(name[6:12]) for name in found.episode_ids})


async def test_a_group_without_variance_is_replaced_by_one_of_a_task_to_come_and_counted(store):
    found, asked = await sampled(store, {1, 4}, 9)
    assert groups_in(found) == [1, 4]
    assert (found.skipped, found.dropped, asked) == (3, 0, [0, 1, 2, 3, 4])
    assert [e.data["group_index"] for e in await store.log.events(0) if e.kind == "group_skipped"] == [0, 2, 3]
    assert [record.task_id for record, _ in await store.groups.of_step("train", 1)] == [
        task_of(index).task_id for index in range(5)
    ]
    again, asked = await sampled(store, set(), 9)  # after a restart
    assert (again, asked) == (found, [])


async def test_no_more_groups_are_replaced_than_is_allowed(store):
    found, _ = await sampled(store, set(), 3)
    assert (groups_in(found), found.skipped) == ([3, 4], 3)


async def test_which_groups_are_replaced_does_not_depend_on_who_was_played_first(store):
    """The last group is complete first; the budget of one is of the first group that has nothing to teach."""
    dynamic = DynamicSampling(teaches=lambda names: asyncio.sleep(0, False), most=1)
    gathering = asyncio.ensure_future(gather_groups(store, CONFIG, PLAIN, 1, 1, {"policy": 0}, dynamic))
    claims = [await claim_when_there(store, f"c{number}") for number in range(6)]
    for claim in [*claims[3:], *claims[:3]]:
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
        await asyncio.sleep(0.01)
    for number in range(6, 9):
        claim = await claim_when_there(store, f"c{number}")
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    assert groups_in(await asyncio.wait_for(gathering, 10)) == [1, 2]


async def claim_when_there(store, name: str):
    while (claim := await store.episodes.claim("w", name, None)) is None:
        await asyncio.sleep(0)
    return claim


# Groups of several tasks


async def test_the_episodes_of_a_group_play_its_tasks_in_turn_and_a_stale_one_is_played_again(store):
    rows = [Task(task_id=str(n), data={"group_id": name}) for n, name in enumerate(["a", "b", "a"])]
    order = in_order(TaskPool(rows, "group_id", 3))
    paced = CONFIG.model_copy(update={"max_staleness": 0})
    playing = asyncio.ensure_future(gather_groups(store, paced, order, 1, 1, {"policy": 1}))
    for number in range(7):
        while (claim := await store.episodes.claim("w", f"c{number}", None)) is None:
            await asyncio.sleep(0)
        old = number == 1
        spans = (VersionSpan(PolicyVersion(0, 0 if old else 1), 2),)
        await store.calls.append(make_chat(claim.episode_id, versions=spans))
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    await asyncio.wait_for(playing, 10)
    played = {
        record.group_index: [e.task.task_id for e in members]
        for record, members in await store.groups.of_step("train", 1)
    }
    together, alone = sorted(played.values(), key=lambda names: "1" in names)
    assert together[:3] == ["0", "2", "0"]
    assert alone[:3] == ["1", "1", "1"]
    assert (together[3:] or alone[3:]) == [(together if len(together) == 4 else alone)[1]]


async def test_an_engine_that_fails_every_episode_is_an_engine_failure(store):
    limited = CONFIG.model_copy(update={"groups_per_step": 1, "max_open_buckets": 1, "group_size": 2})
    gathering = asyncio.ensure_future(gather(store, 1, 0, limited))
    for number in range(6):
        while (claim := await store.episodes.claim("w", f"c{number}", None)) is None:
            await asyncio.sleep(0)
        await store.episodes.abort(claim.episode_id, claim.fence, "engine_failed: no memory", discard=True)
    with pytest.raises(EngineFailure, match="no memory"):
        await asyncio.wait_for(gathering, 10)


# Many groups


async def test_commits_do_not_grow_with_the_groups(store):
    before = store.db.commits
    many = CONFIG.model_copy(update={"groups_per_step": 200, "group_size": 1})
    gathering = asyncio.ensure_future(gather_groups(store, many, PLAIN, 1, 1, {"policy": 0}))
    while await store.groups.next_index("train") < 200:
        await asyncio.sleep(0)
    assert store.db.commits - before <= 8
    gathering.cancel()
    for claim in await store.episodes.claim_many("w", "c", 200):
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    before = store.db.commits
    found = await asyncio.wait_for(gather_groups(store, many, PLAIN, 1, 1, {"policy": 0}), 10)
    assert found.episode_ids == tuple(f"train-{index:06d}-00" for index in range(200))
    assert store.db.commits - before <= 2


async def test_a_step_of_which_only_a_part_was_registered_before_a_restart_gets_the_rest(store, monkeypatch):
    monkeypatch.setattr(groups, "GROUPS_AT_ONCE", 2)
    many = CONFIG.model_copy(update={"groups_per_step": 7})

    async def fails_at_4(step, indices):
        assert max(indices) < 4
        return await PLAIN(step, indices)

    with pytest.raises(AssertionError):
        await gather_groups(store, many, fails_at_4, 1, 1, {"policy": 0})
    assert await store.groups.next_index("train") == 4
    players = asyncio.ensure_future(Players(store).play())
    found = await asyncio.wait_for(gather(store, 1, 0, many), 10)
    players.cancel()
    assert groups_in(found) == [*range(7)]
    of_step = await store.groups.of_step("train", 1)
    assert [record.task_id for record, _ in of_step] == [task_of(index).task_id for index in range(7)]


async def test_a_group_is_settled_when_its_last_episode_ends_while_others_are_played(store):
    gathering = asyncio.ensure_future(gather(store, 1))
    for number in range(6):
        claim = await claim_when_there(store, f"c{number}")
        if claim.episode_id.startswith("train-000001"):
            await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    async with asyncio.timeout(2):
        while [group.state for group in await store.groups.now("train", 1)] != [GroupState.OPEN, GroupState.READY]:
            await asyncio.sleep(0.01)
    gathering.cancel()


async def test_a_group_that_was_dropped_is_replaced_while_others_are_played(store):
    gathering = asyncio.ensure_future(gather(store, 1))
    for number in range(6):
        claim = await claim_when_there(store, f"c{number}")
        if claim.episode_id.startswith("train-000000"):
            await store.episodes.abort(claim.episode_id, 1, "broken", discard=True)
    async with asyncio.timeout(2):
        while await store.groups.next_index("train") < 3:
            await asyncio.sleep(0.01)
    gathering.cancel()
