"""A pool of several kinds: a request goes to a kind that can do it, and is refused where none can."""

from __future__ import annotations

import asyncio

import pytest

from palestra.errors import Conflict, InvalidRequest, ModelError
from palestra.types.calls import PolicyVersion, TokenSequence
from unit.engine.pool.glass import Glasshouse, pool_of
from unit.engine.pool.test_manager import PROMPT, WEIGHTS, expected, long_seed, reply_of, until

KINDS = ("embedded", "vllm")


def house_of(*refusing: int) -> Glasshouse:
    """Workers of which those with these numbers refuse every request."""

    def begin(engine):
        if engine.number not in refusing:
            return

        async def refuses(request):
            engine.asked += 1
            raise InvalidRequest(f"worker {engine.number} can't sample in this way", "temperature")
            yield

        async def refuses_to_score(policy, prompt):
            engine.asked += 1
            raise InvalidRequest(f"worker {engine.number} has no scores", "prompt")

        engine.asked, engine.generate, engine.score = 0, refuses, refuses_to_score

    return Glasshouse(on_start=begin)


@pytest.mark.parametrize("refusing", [0, 1])
async def test_what_one_kind_refuses_the_other_samples(refusing):
    house = house_of(refusing)
    async with pool_of(house, kinds=KINDS) as pool:
        found = await asyncio.gather(*(reply_of(pool, seed) for seed in range(6)))
        assert found == [await expected(seed) for seed in range(6)]
        assert house.started[refusing].asked > 0
        assert house.started[1 - refusing].calls == 6
        assert pool.load().sampled_tokens == sum(map(len, found))
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]


async def test_what_all_kinds_refuse_is_refused_after_each_was_asked_once():
    house = house_of(0, 1, 2)
    async with pool_of(house, replicas=3, kinds=("embedded", "vllm", "vllm")) as pool:
        with pytest.raises(InvalidRequest, match=r"0.*sample") as refused:
            await reply_of(pool)
        assert refused.value.field == "temperature"
        assert [engine.asked for engine in house.started] == [1, 1, 0]
        with pytest.raises(InvalidRequest, match=r"0.*scores"):
            await pool.score("policy", TokenSequence(PROMPT))


async def test_workers_that_are_alike_are_not_asked_again():
    house = house_of(0, 1)
    async with pool_of(house) as pool:
        with pytest.raises(InvalidRequest, match="worker 0"):
            await reply_of(pool)
        assert [engine.asked for engine in house.started] == [1, 0]


async def test_a_request_waits_for_the_only_kind_that_can_do_it():
    house = house_of(1)
    async with pool_of(house, kinds=KINDS) as pool:
        house.started[0].breaks_after = 5
        assert await asyncio.wait_for(reply_of(pool, long_seed()), 10) == await expected(long_seed())
        assert [worker.restarts for worker in pool.load().workers] == [1, 0]


async def test_a_score_comes_from_a_kind_that_has_scores():
    house = house_of(0)
    async with pool_of(house, kinds=KINDS) as pool:
        assert len(await pool.score("policy", TokenSequence(PROMPT))) == len(PROMPT) - 1
        assert house.started[0].asked == 1


async def test_each_worker_that_has_scores_is_asked_for_them():
    house = house_of(1)
    async with pool_of(house, replicas=3, kinds=("embedded", "vllm", "embedded")) as pool:
        found = await pool.scores("policy", TokenSequence(PROMPT))
        assert [len(one) for one in found] == [len(PROMPT) - 1] * 2
        assert house.started[1].asked == 1


async def test_workers_say_their_kind_and_their_number_stays():
    house = Glasshouse()
    async with pool_of(house, kinds=KINDS) as pool:
        names = ["inference worker 0 (embedded)", "inference worker 1 (vllm)"]
        assert [worker.name for worker in pool.load().workers] == names
        house.started[1].break_now()
        await until(lambda: [worker.restarts for worker in pool.load().workers] == [0, 1])
        assert [worker.name for worker in pool.load().workers] == names
        assert [engine.number for engine in house.started] == [0, 1, 1]
        with pytest.raises(Conflict, match=r"engine\.workers"):
            await pool.resize(3)


async def test_a_policy_for_which_one_kind_has_no_room_is_refused_and_costs_no_worker():
    def begin(engine):
        if engine.number == 1:

            async def has_no_room(name, like, version, source):
                raise ModelError("a server has the whole weights of one model")

            engine.add_policy = has_no_room

    house = Glasshouse(on_start=begin)
    async with pool_of(house, kinds=KINDS) as pool:
        with pytest.raises(ModelError, match="whole weights"):
            await pool.add_policy("past", "policy", PolicyVersion(0, 0), WEIGHTS)
        with pytest.raises(ModelError, match="not 'past'"):
            pool.version("past")
        await pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)
        wanted = {"policy": "0.1"}  # the worker that had taken the other policy has dropped it
        assert [worker.versions for worker in pool.load().workers] == [wanted, wanted]
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]
