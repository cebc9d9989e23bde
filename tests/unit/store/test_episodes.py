from __future__ import annotations

import asyncio
import uuid

import pytest

from palestra.errors import (
    Conflict,
    EpisodeEnded,
    EpisodeLeaseExpired,
    IllegalTransition,
    InvalidRequest,
    NotFound,
)
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.records import RecordedEpisode, Task
from palestra.types.states import EpisodeState, GroupState
from unit.building import TASK, FakeClock, open_store
from unit.store.playing import claim, end, register, state

FIRST, SECOND = "train-000000-00", "train-000000-01"


# Registering


async def test_a_group_has_its_episodes_once(store):
    await register(store, size=3)
    await register(store, size=3)
    assert (await store.episodes.counts()).registered == 3
    episode = await store.episodes.get("train-000000-02")
    assert (episode.group_index, episode.sample_index, episode.fence, episode.attempts) == (0, 2, 0, 0)
    assert (episode.task, episode.rewards, episode.reward) == (TASK, None, None)


async def test_an_unknown_episode_is_not_found(store):
    with pytest.raises(NotFound, match="'nope'"):
        await store.episodes.get("nope")


async def test_an_adhoc_episode_is_registered_once_by_request(store):
    one = await store.episodes.register_adhoc(TASK, "a")
    assert await store.episodes.register_adhoc(TASK, "a") == one
    two = await store.episodes.register_adhoc(TASK, "b")
    assert two != one
    assert {(await store.episodes.get(e)).group_index for e in (one, two)} == {0, 1}


# Claiming


async def test_claims_go_in_canonical_order_validation_first(store):
    await register(store, groups=2)
    await store.groups.register("validation", 0, 0, TASK, 1)
    order = [(await claim(store, f"r{i}")).episode_id for i in range(5)]
    assert order == ["validation-000000-00", FIRST, SECOND, "train-000001-00", "train-000001-01"]
    assert await store.episodes.claim("w", "r6", None) is None


async def test_adhoc_episodes_are_claimed_by_name_only(store):
    name = await store.episodes.register_adhoc(TASK, "a")
    assert await store.episodes.claim("w", "r", None) is None
    assert (await claim(store, episode_id=name)).episode_id == name


async def test_a_claim_says_for_whom_and_for_how_long_it_is(store):
    await register(store)
    found = await store.episodes.claim("w", "r", None)
    assert (found.worker_id, found.lease_seconds) == ("w", 60.0)


async def test_the_same_request_gets_the_same_claim(store):
    await register(store)
    one = await claim(store, "r")
    again = await claim(store, "r")
    assert (again.episode_id, again.fence, again.attempts) == (one.episode_id, 1, 1)
    assert (await claim(store, "s")).episode_id == SECOND


async def test_a_request_whose_claim_is_over_gets_no_other_episode(store):
    await register(store)
    one = await claim(store, "r")
    await end(store, one)
    with pytest.raises(Conflict, match=r"'r'.*over"):
        await claim(store, "r")
    assert (await store.episodes.counts()).registered == 1


async def test_a_claimed_or_ended_episode_can_not_be_claimed_by_name(store):
    await register(store)
    one = await claim(store, "r")
    with pytest.raises(IllegalTransition):
        await claim(store, "s", episode_id=FIRST)
    await end(store, one)
    with pytest.raises(IllegalTransition):
        await claim(store, "t", episode_id=FIRST)
    with pytest.raises(NotFound):
        await claim(store, "u", episode_id="nope")


async def test_a_lease_may_be_asked_for_up_to_the_limit(store):
    await register(store)
    assert (await claim(store, "r", lease=600.0)).lease_seconds == 600.0
    with pytest.raises(InvalidRequest, match="3601 s"):
        await claim(store, "s", lease=3601.0)


async def test_many_tasks_never_get_the_same_episode(store):
    await register(store, groups=10, size=8)
    played: list[tuple[str, int]] = []

    async def worker(name: str) -> None:
        number = 0
        while (found := await store.episodes.claim(name, f"{name}-{number}", None)) is not None:
            number += 1
            played.append((found.episode_id, found.fence))
            await end(store, found)

    await asyncio.gather(*(worker(f"w{i}") for i in range(32)))
    assert len(played) == len(set(played)) == 80
    assert {fence for _, fence in played} == {1}
    assert (await store.episodes.counts()).completed == 80


async def test_one_request_sent_many_times_at_once_takes_one_episode(store):
    await register(store, groups=4)
    found = await asyncio.gather(*(claim(store, "r") for _ in range(20)))
    assert {(e.episode_id, e.fence) for e in found} == {(FIRST, 1)}
    assert (await store.episodes.counts()).claimed == 1


# Ending


async def test_an_end_is_kept_as_it_was_handed_in(store):
    await register(store)
    one = await claim(store)
    assert await store.episodes.end(
        FIRST, 1, EpisodeEnd(rewards={"a": 0.1, "b": -3.0}, step_rewards=[0.5, 1 / 3], metadata={"why": ["x", None]})
    )
    episode = await store.episodes.get(FIRST)
    assert episode.state is EpisodeState.COMPLETED
    assert (episode.rewards, episode.step_rewards) == ({"a": 0.1, "b": -3.0}, (0.5, 1 / 3))
    assert (episode.reward, episode.metadata) == (0.1 - 3.0, {"why": ["x", None]})
    assert one.fence == episode.fence


async def test_the_same_end_again_changes_nothing_and_another_is_refused(store):
    await register(store)
    one = await claim(store)
    assert await end(store, one, 0.5, metadata={"a": 1, "b": 2})
    assert not await end(store, one, 0.5, metadata={"a": 1, "b": 2})
    for other in ({"reward": 0.6}, {"metadata": {"a": 2}}, {"step_rewards": [0.5]}):
        with pytest.raises(Conflict, match="another body"):
            await end(store, one, **({"reward": 0.5, "metadata": {"a": 1, "b": 2}} | other))
    assert (await store.episodes.get(FIRST)).reward == 0.5
    assert (await store.episodes.counts()).completed == 1


async def test_many_equal_ends_at_once_count_once(store):
    await register(store)
    one = await claim(store)
    assert sorted(await asyncio.gather(*(end(store, one) for _ in range(10)))) == [False] * 9 + [True]


async def test_many_different_ends_at_once_leave_one(store):
    await register(store)
    one = await claim(store)
    found = await asyncio.gather(*(end(store, one, float(i)) for i in range(10)), return_exceptions=True)
    assert sum(f is True for f in found) == 1
    assert sum(isinstance(f, Conflict) for f in found) == 9
    assert (await store.episodes.get(FIRST)).reward == float(found.index(True))


async def test_what_is_not_claimed_can_not_be_ended(store):
    await register(store)
    with pytest.raises(EpisodeLeaseExpired):
        await store.episodes.end(FIRST, 0, EpisodeEnd(rewards={"agent": 1.0}))
    with pytest.raises(NotFound):
        await store.episodes.end("nope", 1, EpisodeEnd(rewards={"agent": 1.0}))


# Giving back


async def test_an_episode_given_back_is_claimed_anew_under_a_new_fence(store):
    await register(store)
    one = await claim(store, "r")
    await store.episodes.abort(FIRST, 1, "tripped", discard=False)
    assert await state(store, FIRST) is EpisodeState.REGISTERED
    again = await claim(store, "s")
    assert (again.episode_id, again.fence, again.attempts) == (FIRST, 2, 2)
    assert one.fence == 1


async def test_the_former_holder_is_refused_everything(store):
    await register(store)
    late = await claim(store, "r")
    await store.episodes.abort(FIRST, 1, "", discard=False)
    for refused in (
        end(store, late),
        store.episodes.abort(FIRST, 1, "", discard=False),
        store.episodes.abort(FIRST, 1, "", discard=True),
        store.episodes.renew(FIRST, 1),
    ):
        with pytest.raises(EpisodeLeaseExpired):
            await refused
    present = await claim(store, "s")
    for refused in (end(store, late), store.episodes.abort(FIRST, 1, "", discard=True), store.episodes.renew(FIRST, 1)):
        with pytest.raises(EpisodeLeaseExpired, match=r"claim 1.*2"):
            await refused
    assert await end(store, present, 0.25)
    with pytest.raises(EpisodeLeaseExpired):
        await end(store, late, 0.25)
    assert (await store.episodes.get(FIRST)).reward == 0.25


async def test_a_fence_of_the_future_is_refused_too(store):
    await register(store)
    one = await claim(store)
    with pytest.raises(EpisodeLeaseExpired):
        await end(store, one, fence=2)


async def test_after_its_last_attempt_an_episode_is_discarded(tmp_path, clock):
    with open_store(tmp_path, clock, max_attempts=3) as store:
        await register(store, size=1)
        for attempt in range(3):
            assert await state(store, FIRST) is EpisodeState.REGISTERED
            await claim(store, f"r{attempt}")
            await store.episodes.abort(FIRST, attempt + 1, "tripped", discard=False)
        assert await state(store, FIRST) is EpisodeState.DISCARDED
        assert await store.episodes.claim("w", "r9", None) is None


async def test_an_episode_may_be_discarded_at_once_and_stays_so(store):
    await register(store)
    one = await claim(store, "r")
    await store.episodes.abort(FIRST, 1, "hopeless", discard=True)
    assert await state(store, FIRST) is EpisodeState.DISCARDED
    for refused in (end(store, one), store.episodes.abort(FIRST, 1, "", discard=False), store.episodes.renew(FIRST, 1)):
        with pytest.raises(EpisodeEnded, match="discarded"):
            await refused
    with pytest.raises(IllegalTransition):
        await claim(store, "s", episode_id=FIRST)


async def test_a_completed_episode_can_not_be_given_back(store):
    await register(store)
    one = await claim(store)
    await end(store, one)
    with pytest.raises(EpisodeEnded, match="completed"):
        await store.episodes.abort(FIRST, 1, "", discard=True)
    assert await state(store, FIRST) is EpisodeState.COMPLETED


# Groups


async def test_groups_of_a_step_are_in_canonical_order_with_their_episodes(store):
    await store.groups.register("train", 1, 1, TASK, 2)
    await store.groups.register("train", 0, 1, Task(task_id="u", data={}), 1)
    await store.groups.register("train", 2, 2, TASK, 1)
    await store.groups.register("validation", 0, 1, TASK, 1)
    found = await store.groups.of_step("train", 1)
    assert [(r.group_index, r.task_id, r.size, r.state) for r, _ in found] == [
        (0, "u", 1, GroupState.OPEN),
        (1, "t", 2, GroupState.OPEN),
    ]
    assert [[e.episode_id for e in members] for _, members in found] == [
        ["train-000000-00"],
        ["train-000001-00", "train-000001-01"],
    ]
    assert await store.groups.of_step("train", 9) == []
    assert [await store.groups.next_index(kind) for kind in ("train", "validation", "adhoc")] == [3, 1, 0]


async def test_a_group_of_another_step_in_between_is_left_out(store):
    for index, step in ((0, 1), (1, 2), (2, 1)):
        await store.groups.register("train", index, step, TASK, 1)
    assert [r.group_index for r, _ in await store.groups.of_step("train", 1)] == [0, 2]


async def test_a_group_is_settled_once(store):
    await register(store)
    await store.groups.settle("train", {0: GroupState.READY})
    await store.groups.settle("train", {0: GroupState.READY})
    with pytest.raises(IllegalTransition):
        await store.groups.settle("train", {0: GroupState.DROPPED})
    assert (await store.groups.of_step("train", 1))[0][0].state is GroupState.READY


async def test_counts_are_of_all_kinds(store):
    await register(store, groups=2)
    await store.groups.register("validation", 0, 0, TASK, 1)
    one, two = await claim(store, "a"), await claim(store, "b")
    await end(store, one)
    await store.episodes.abort(two.episode_id, 1, "", discard=True)
    await claim(store, "c")
    counts = await store.episodes.counts()
    assert (counts.registered, counts.claimed, counts.completed, counts.discarded) == (2, 1, 1, 1)


async def test_all_workers_together_hold_no_more_than_allowed_and_the_next_end_wakes_one(tmp_path):
    with open_store(tmp_path, FakeClock(), max_claimed=3) as store:
        await register(store, groups=2, size=4)
        adhoc = await store.episodes.register_adhoc(TASK, "r")
        first = await store.episodes.claim("a", "a0", None)
        assert len(await store.episodes.claim_many("palestra-runner", "all", 9)) == 2
        assert await store.episodes.claim("b", "b0", None) is None
        assert await store.episodes.claim("b", "b1", None, adhoc) is None
        assert await store.episodes.claim_many("palestra-runner", "more", 9) == []
        assert (await store.episodes.claim("a", "a0", None)) == first  # a retry gets what it has
        for leave, wanted in (
            (lambda: store.episodes.end(FIRST, 1, EpisodeEnd(rewards={"agent": 1.0})), adhoc),
            (lambda: store.episodes.abort(SECOND, 1, "no", discard=True), None),
            (lambda: store.episodes.abort(adhoc, 1, "no", discard=True), None),
        ):
            assert await store.episodes.claim("b", "none", None, wanted) is None
            waiting = asyncio.ensure_future(store.episodes.available.wait(3600, store.episodes.available.count))
            await asyncio.sleep(0)
            await leave()
            await waiting
            assert await store.episodes.claim("b", uuid.uuid4().hex, None, wanted) is not None
            assert await store.episodes.claim("b", "none", None) is None
        assert (await store.episodes.counts()).claimed == 3


async def test_workers_that_claim_at_the_same_moment_do_not_pass_the_limit_either(tmp_path):
    with open_store(tmp_path, FakeClock(), max_claimed=5) as store:
        await register(store, groups=4, size=8)
        asked = [store.episodes.claim("a", f"a{n}", None) for n in range(4)] + [
            store.episodes.claim_many("b", f"b{n}", 3) for n in "12"
        ]
        await asyncio.gather(*asked)
        assert (await store.episodes.counts()).claimed == len(store.leases) == 5
    with open_store(tmp_path, FakeClock(), max_claimed=5) as again:
        assert await again.episodes.claim("a", "later", None) is None


async def test_without_a_limit_one_worker_may_take_all_of_a_group(store):
    await register(store, size=4)
    assert [(await claim(store, f"r{n}")).group_index for n in range(4)] == [0] * 4


# Rewards that are no numbers


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", ["rewards", "step_rewards", "named_rewards"])
async def test_a_reward_that_is_not_finite_is_never_stored(store, odd, place):
    await register(store)
    episode = await claim(store)
    given = {
        "rewards": {"agent": odd if place == "rewards" else 1.0},
        "step_rewards": [1.0, odd] if place == "step_rewards" else None,
        "named_rewards": {"right": None, "short": odd} if place == "named_rewards" else None,
    }
    with pytest.raises(InvalidRequest, match=rf"is {odd}.*finite"):
        await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(**given))
    assert (await store.episodes.get(episode.episode_id)).state is EpisodeState.CLAIMED
    recorded = RecordedEpisode(task=TASK, metadata={}, calls=(), **given)
    with pytest.raises(InvalidRequest, match=rf"is {odd}.*finite"):
        await store.groups.register_recorded(7, 1, [recorded])
    assert await end(store, episode)
