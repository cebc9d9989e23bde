from __future__ import annotations

import asyncio

import pytest

from palestra.store.counting import OpenGroups
from palestra.store.lifecycle import EpisodeEnd
from unit.building import TASK, open_store

FOUND = [("train", 1, 0, 2), ("train", 1, 1, 1), ("train", 2, 2, 1), ("validation", 1, 0, 1)]


def test_a_group_is_open_until_its_last_episode_has_ended():
    groups = OpenGroups(FOUND)
    groups.ended("train-000000-01")
    assert (groups.number("train", 1), groups.settled.count) == (2, 0)
    groups.ended("train-000000-00")
    assert (groups.number("train", 1), groups.settled.count) == (1, 1)
    groups.add("train", 1, 0, 1)  # one of its episodes has to be played again
    assert (groups.number("train", 1), groups.number("train", 2), groups.number("validation", 1)) == (2, 1, 1)


@pytest.mark.parametrize("name", ["adhoc-0123", "train-000009-00"])
def test_an_episode_of_no_known_group_counts_nothing(name):
    groups = OpenGroups(FOUND)
    groups.ended(name)
    assert (groups.number("train", 1), groups.settled.count) == (2, 0)


async def test_whoever_waits_is_woken_by_the_groups_of_its_own_step():
    groups = OpenGroups(FOUND)
    waiting = asyncio.ensure_future(groups.wait("train", 1, 2, 5))
    for name in ("train-000002-00", "validation-000000-00", "train-000000-00"):
        groups.ended(name)
        await asyncio.sleep(0.001)
        assert not waiting.done()
    groups.ended("train-000001-00")
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(groups.wait("train", 1, 1, 0.01), 1)  # one is open still, and the time is over


async def test_a_store_that_is_opened_again_knows_its_open_groups(tmp_path):
    with open_store(tmp_path) as store:
        await store.groups.register_many("train", 1, {0: (TASK,), 1: (TASK,)}, 2)
        await store.groups.register("validation", 0, 0, TASK, 1)
        for number in range(4):
            claim = await store.episodes.claim("w", f"c{number}", None)
            if number:
                await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
    with open_store(tmp_path) as store:
        assert [store.groups.open.number(kind, step) for kind, step in (("train", 1), ("validation", 0))] == [1, 1]
        last = await store.episodes.claim("w", "c9", None)
        assert last.episode_id == "train-000001-01"
        await store.episodes.end(last.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
        assert store.groups.open.number("train", 1) == 0


async def test_a_verdict_on_an_episode_that_is_over_counts_nothing(tmp_path):
    with open_store(tmp_path) as store:
        store.episodes.judged = True
        await store.groups.register("train", 0, 1, TASK, 2)
        claim = await store.episodes.claim("w", "c", None)
        await store.episodes.end(claim.episode_id, 1, EpisodeEnd(rewards={"agent": 1.0}))
        verdict = EpisodeEnd(rewards={"agent": 2.0}, named_rewards={"right": 2.0})
        for _ in range(2):
            await store.episodes.judge(claim, verdict)
        assert store.groups.open.number("train", 1) == 1, "the other episode is not played"
        assert [rewards for rewards, _ in store.episodes.recent_rewards] == [{"agent": 2.0}]
