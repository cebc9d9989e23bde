from __future__ import annotations

import asyncio
import io

import pytest

from palestra.config import GRPOConfig, JobConfig, Roles
from palestra.learner.evaluation import validate
from palestra.runtime.console import console_of
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.records import Task
from unit.building import SOLE, make_chat

PLAIN = GRPOConfig()
TASKS = [Task(task_id=str(i), data={"i": i}) for i in range(4)]


async def play(store, count: int, *, discard=()) -> list[str]:
    """Claim and score so many episodes with the number of their task; returns which."""
    played = []
    while len(played) < count:
        episode = await store.episodes.claim("w", f"r{len(played)}-{asyncio.get_running_loop().time()}", None)
        if episode is None:
            await asyncio.sleep(0)
            continue
        played.append(episode.episode_id)
        if episode.task.data["i"] in discard:
            await store.episodes.abort(episode.episode_id, episode.fence, "", discard=True)
        else:
            await store.episodes.end(
                episode.episode_id, episode.fence, EpisodeEnd(rewards={"agent": float(episode.task.data["i"])})
            )
    return played


async def test_every_task_is_scored_once(store):
    found, played = await asyncio.wait_for(
        asyncio.gather(validate(store.groups, TASKS, 5, SOLE, PLAIN), play(store, 4)), 10
    )
    assert found["validation/reward_mean"] == 1.5
    assert (found["validation/scored"], found["validation/total"]) == (4, 4)
    assert played == [f"validation-{i:06d}-00" for i in range(4)]


async def test_the_replies_that_were_cut_are_counted(store):
    for index, (task, reason) in enumerate(zip(TASKS, ("stop", "length", "length", "stop"), strict=True)):
        await store.groups.register("validation", index, 5, task, 1)
        one = await store.episodes.claim("w", f"r{index}", None)
        await store.calls.append(make_chat(one.episode_id, fence=one.fence, finish_reason=reason))
        await store.episodes.end(one.episode_id, one.fence, EpisodeEnd(rewards={"agent": 1.0}))
    found = await validate(store.groups, TASKS, 5, SOLE, PLAIN)
    assert (found["validation/replies"], found["validation/replies_cut"]) == (4, 2)
    config = JobConfig(name="a")
    for row, said in ((found, "2 of 4 replies cut"), (found | {"validation/replies_cut": 0.0}, "on 4 tasks\n")):
        out = io.StringIO()
        console_of(config, file=out).report("evaluated", row | {"step": 0})
        assert "before training" in out.getvalue()
        assert said in out.getvalue()


async def test_what_could_not_be_scored_is_no_zero_but_said(store):
    found, _ = await asyncio.wait_for(
        asyncio.gather(validate(store.groups, TASKS, 0, SOLE, PLAIN), play(store, 4, discard=(0, 3))), 10
    )
    assert found["validation/reward_mean"] == 1.5
    assert (found["validation/scored"], found["validation/total"]) == (2, 4)


async def test_where_nothing_could_be_scored_there_is_no_mean(store):
    found, _ = await asyncio.wait_for(
        asyncio.gather(validate(store.groups, TASKS, 0, SOLE, PLAIN), play(store, 4, discard=(0, 1, 2, 3))), 10
    )
    assert "validation/reward_mean" not in found
    assert found["validation/scored"] == 0


async def test_what_was_scored_before_a_restart_is_not_played_again(store):
    first = asyncio.ensure_future(validate(store.groups, TASKS, 5, SOLE, PLAIN))
    early = await play(store, 2)
    first.cancel()
    found, late = await asyncio.wait_for(
        asyncio.gather(validate(store.groups, TASKS, 5, SOLE, PLAIN), play(store, 2)), 10
    )
    assert found["validation/reward_mean"] == 1.5
    assert not set(early) & set(late)
    assert await store.groups.next_index("validation") == 4


async def test_the_next_evaluation_has_episodes_of_its_own(store):
    for step in (0, 5):
        await asyncio.wait_for(asyncio.gather(validate(store.groups, TASKS, step, SOLE, PLAIN), play(store, 4)), 10)
    assert await store.groups.next_index("validation") == 8
    assert (await validate(store.groups, TASKS, 5, SOLE, PLAIN))["validation/reward_mean"] == pytest.approx(1.5)


async def test_what_a_frozen_policy_earned_is_in_no_mean(store):
    roles = Roles(default="policy", named={"opponent": "old"}, frozen=frozenset({"old"}))

    async def lose() -> None:
        for number, _ in enumerate(TASKS):
            while (episode := await store.episodes.claim("w", f"l{number}", None)) is None:
                await asyncio.sleep(0)
            await store.episodes.end(
                episode.episode_id, episode.fence, EpisodeEnd(rewards={"agent": -0.5, "opponent": 0.5})
            )

    found, _ = await asyncio.wait_for(asyncio.gather(validate(store.groups, TASKS, 5, roles, PLAIN), lose()), 10)
    assert (found["validation/reward_mean"], found["validation/scored"]) == (-0.5, 4)


async def test_rewards_by_name_have_means_of_their_own_over_the_tasks_in_which_they_were_scored(store):
    named = [{"right": 1.0, "style": None}, {"right": 0.0, "style": 4.0}, {"right": 1.0, "style": 8.0}, {"right": 1.0}]
    weighed = GRPOConfig(reward_weights={"style": 0.5})

    async def score() -> None:
        for number, rewards in enumerate(named):
            while (episode := await store.episodes.claim("w", f"l{number}", None)) is None:
                await asyncio.sleep(0)
            total = {"agent": weighed.weighted_sum(rewards)}
            await store.episodes.end(
                episode.episode_id, episode.fence, EpisodeEnd(rewards=total, named_rewards=rewards)
            )

    found, _ = await asyncio.wait_for(asyncio.gather(validate(store.groups, TASKS, 5, SOLE, weighed), score()), 10)
    assert (found["validation/rewards/right"], found["validation/rewards/style"]) == (0.75, 6.0)
    # What was not scored is no 0: it is as good as the others.
    assert found["validation/reward_mean"] == 0.75 + 0.5 * 6.0


@pytest.mark.parametrize("rivals", [("policy",), ("policy", "black")], ids=["one", "two"])
async def test_what_agents_earn_that_draw_their_moves_is_of_no_policy(store, rivals):
    """Also not of the policy that would play them."""
    several = rivals if len(rivals) > 1 else ()
    roles = Roles(default="policy", named={"agent": "policy", "other": rivals[-1]}, rivals=several)
    drawn = {"without_policy": ["other"]}

    async def win() -> None:
        for number, _ in enumerate(TASKS):
            while (episode := await store.episodes.claim("w", f"l{number}", None)) is None:
                await asyncio.sleep(0)
            await store.episodes.end(
                episode.episode_id, episode.fence, EpisodeEnd(rewards={"agent": 0.5, "other": 7.0}, facts=drawn)
            )

    found, _ = await asyncio.wait_for(asyncio.gather(validate(store.groups, TASKS, 5, roles, PLAIN), win()), 10)
    means = {name: value for name, value in found.items() if "reward_mean" in name}
    assert means == {"policy/validation/reward_mean" if several else "validation/reward_mean": 0.5}
