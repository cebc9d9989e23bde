"""A pool is one engine: whatever becomes of its workers, each reply arrives once, as one engine would sample it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from palestra.engine.fake import FakeEngine, digits_script
from palestra.engine.pool import keeper
from palestra.errors import ConfigError, Conflict, EngineFailure, ModelError, PalestraError, ReplyLost
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra.waiting import cancelled
from unit.building import engine_request
from unit.engine.pool.glass import Glasshouse, pool_of

PROMPT = np.arange(40, 104, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
WEIGHTS = LocalWeights(())


async def reply_of(engine, seed=3, prompt=PROMPT):
    pieces = [piece async for piece in engine.generate(engine_request(prompt, replace(SAMPLING, seed=seed)))]
    return [token for piece in pieces for token in piece.ids]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def long_seed():
    """A seed whose reply is long enough to be cut."""
    script = digits_script(12, 258)
    return next(seed for seed in range(100) if len(script(PROMPT, replace(SAMPLING, seed=seed))) >= 10)


async def expected(seed):
    return await reply_of(FakeEngine(digits_script(12, 258)), seed)


async def test_replies_are_those_of_one_engine_and_both_workers_have_some():
    house = Glasshouse()
    async with pool_of(house) as pool:
        found = await asyncio.gather(*(reply_of(pool, seed) for seed in range(20)))
        assert found == [await expected(seed) for seed in range(20)]
        assert all(engine.calls for engine in house.started)
        assert pool.load().sampled_tokens == sum(map(len, found))


async def test_a_conversation_stays_where_its_beginning_is():
    house = Glasshouse()
    async with pool_of(house) as pool:
        other = asyncio.ensure_future(reply_of(pool, long_seed(), PROMPT + 100))
        await until(lambda: pool.load().workers[0].requests)
        first = await reply_of(pool, 3, PROMPT)
        await other
        for turn in range(5):
            await reply_of(
                pool, turn, np.concatenate([PROMPT, np.array(first, np.int32), np.arange(8, dtype=np.int32)])
            )
        assert [engine.calls for engine in house.started] == [1, 6]


@pytest.mark.parametrize("tokens", range(10))
async def test_a_reply_whose_worker_dies_at_any_token_is_the_same_reply(tokens):
    house = Glasshouse()
    async with pool_of(house) as pool:
        house.started[0].breaks_after = tokens
        seed = long_seed()
        assert await reply_of(pool, seed) == await expected(seed)
        assert house.started[1].calls == 1
        await until(lambda: all(worker.state == "ready" for worker in pool.load().workers))
        assert [worker.restarts for worker in pool.load().workers] == [1, 0]


async def test_what_the_caller_has_and_newer_weights_do_not_repeat_is_a_lost_reply():
    house = Glasshouse(by_version=True)
    async with pool_of(house) as pool:
        house.started[0].breaks_after = 5
        await house.started[1].sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)
        with pytest.raises(ReplyLost):
            await reply_of(pool, long_seed())


async def test_a_request_that_kills_its_workers_does_not_kill_all_of_them():
    house = Glasshouse(on_start=lambda engine: setattr(engine, "breaks_after", 2))
    async with pool_of(house) as pool:
        with pytest.raises(EngineFailure, match=r"3.*workers"):
            await asyncio.wait_for(reply_of(pool, long_seed()), 20)
        for engine in house.alive:
            engine.breaks_after = None
        house.on_start = None
        assert await reply_of(pool, 1) == await expected(1)


async def test_a_failure_of_a_request_alone_is_the_callers(monkeypatch):
    house = Glasshouse()

    async def fails(request):
        raise EngineFailure("out of memory")
        yield

    monkeypatch.setattr("palestra.engine.pool.worker.GRACE_SECONDS", 0.01)
    async with pool_of(house) as pool:
        monkeypatch.setattr(house.started[0], "generate", fails)
        with pytest.raises(EngineFailure, match="of memory"):
            await reply_of(pool)
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]


async def test_a_replaced_worker_has_the_present_weights_of_every_policy_before_it_serves():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.add_policy("first", "policy", PolicyVersion(0, 0), None)
        await pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)
        await pool.add_policy("past", "first", PolicyVersion(0, 7), WEIGHTS)
        await pool.add_policy("dropped", "policy", PolicyVersion(0, 2), WEIGHTS)
        await pool.remove_policy("dropped")
        await pool.sync_weights("policy", PolicyVersion(0, 3), WEIGHTS)
        for engine in list(house.started):
            engine.break_now()
        assert await reply_of(pool) == await expected(3)  # waits for a worker
        for engine in house.alive:
            names = {"policy": PolicyVersion(0, 3), "first": PolicyVersion(0, 0), "past": PolicyVersion(0, 7)}
            assert engine._versions == names
        assert pool.version("policy") == PolicyVersion(0, 3)
        with pytest.raises(ModelError, match="not 'dropped'"):
            pool.version("dropped")


@pytest.mark.parametrize(("sync", "most"), [("rolling", 1), ("all", 2)])
async def test_rolling_updates_leave_a_worker_that_serves_and_all_updates_do_not(sync, most):
    house, at_once, peak = Glasshouse(), 0, 0
    async with pool_of(house, sync=sync) as pool:

        def slow(engine):
            async def take(policy, version, source):
                nonlocal at_once, peak
                at_once += 1
                peak = max(peak, at_once)
                await asyncio.sleep(0.01)
                at_once -= 1
                engine._versions[policy] = version

            return take

        for engine in house.started:
            engine.sync_weights = slow(engine)
        update = asyncio.ensure_future(pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS))
        await until(lambda: at_once)
        assert pool.version("policy") == PolicyVersion(0, 0)
        assert await reply_of(pool) == await expected(3)
        await update
        assert (peak, pool.version("policy")) == (most, PolicyVersion(0, 1))


async def test_weights_that_do_not_fit_leave_the_pool_as_it_was():
    house = Glasshouse(on_start=lambda engine: setattr(engine, "refuses", True))
    async with pool_of(house) as pool:
        with pytest.raises(ModelError, match="not fit"):
            await pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)
        assert pool.version("policy") == PolicyVersion(0, 0)
        assert await reply_of(pool) == await expected(3)
        house.started[0].break_now()
        await until(lambda: len(house.alive) == 2)


async def test_an_added_policy_whose_files_are_gone_is_dropped_and_the_pool_goes_on():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.add_policy("past", "policy", PolicyVersion(0, 7), WEIGHTS)

        async def gone(*_):
            raise ModelError("no such file")

        house.on_start = lambda engine: setattr(engine, "add_policy", gone)
        house.started[0].break_now()
        await until(lambda: len(house.alive) == 2 and all(w.state == "ready" for w in pool.load().workers))
        with pytest.raises(ModelError, match="not 'past'"):
            pool.version("past")
        assert await reply_of(pool) == await expected(3)


@pytest.mark.parametrize("fault", ["dies_in_update", "hangs_in_update"])
@pytest.mark.parametrize("sync", ["rolling", "all"])
async def test_a_worker_that_is_lost_in_an_update_does_not_hold_it_up(fault, sync):
    house = Glasshouse()
    async with pool_of(house, sync=sync, stuck_seconds=0.05) as pool:
        setattr(house.started[0], fault, True)
        await asyncio.wait_for(pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS), 10)
        await until(lambda: len(house.alive) == 2 and all(w.state == "ready" for w in pool.load().workers))
        assert [engine.version("policy") for engine in house.alive] == [PolicyVersion(0, 1)] * 2


async def test_a_worker_that_stands_still_is_replaced_and_its_reply_is_sampled_elsewhere():
    house = Glasshouse()
    async with pool_of(house, stuck_seconds=0.05) as pool:
        house.started[0].stopped.set()
        assert await asyncio.wait_for(reply_of(pool), 10) == await expected(3)
        assert house.started[0].broken.result() == "was killed by the pool"


@pytest.mark.parametrize("moves", [True, False])
async def test_a_worker_to_which_weights_come_bit_by_bit_is_not_stuck(moves):
    house = Glasshouse()
    async with pool_of(house, replicas=1, stuck_seconds=0.2) as pool:
        (engine,), moved = house.started, [0]
        load, sync = engine.load, engine.sync_weights

        async def slow(*given):
            for _ in range(20):
                await asyncio.sleep(0.03)
                moved[0] += moves
            await sync(*given)

        engine.sync_weights, engine.load = slow, lambda: replace(load(), moved_bytes=moved[0])
        await asyncio.wait_for(pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS), 10)
        assert (engine in house.alive) == moves
        if moves:
            assert pool.load().moved_bytes == 20
        await until(lambda: pool.version("policy") == PolicyVersion(0, 1))


async def test_a_worker_that_is_idle_or_paused_is_not_stuck():
    house = Glasshouse()
    async with pool_of(house, stuck_seconds=0.02) as pool:
        await pool.pause()
        call = asyncio.ensure_future(reply_of(pool))
        await asyncio.sleep(0.1)
        await pool.resume()
        assert await call == await expected(3)
        await asyncio.sleep(0.1)
        assert len(house.alive) == len(house.started) == 2


async def test_a_worker_that_starts_while_the_pool_is_paused_waits_like_the_others():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.pause()
        for engine in list(house.started):
            engine.break_now()
        call = asyncio.ensure_future(reply_of(pool))
        await until(lambda: len(house.alive) == 2 and all(w.state == "ready" for w in pool.load().workers))
        await asyncio.sleep(0.01)
        assert not call.done()
        await pool.resume()
        assert await asyncio.wait_for(call, 10) == await expected(3)


async def test_prompts_that_are_scored_together_are_spread_over_the_workers():
    house = Glasshouse()
    async with pool_of(house) as pool:
        asked = []
        for engine in house.started:

            async def score(policy, prompt, number=engine.number):
                asked.append(number)
                await asyncio.sleep(0.01)
                return [0.0] * (len(prompt.ids) - 1)

            engine.score = score
        await asyncio.gather(*(pool.score("policy", TokenSequence(PROMPT)) for _ in range(4)))
        assert sorted(asked) == [0, 0, 1, 1]


async def test_after_failures_in_a_row_the_pool_has_failed_and_says_which_worker_and_why(monkeypatch):
    monkeypatch.setattr(keeper, "BACKOFF_SECONDS", 0.001)
    house = Glasshouse()
    async with pool_of(house) as pool:
        house.on_start = lambda engine: engine.break_now("was killed by SIGKILL")
        house.started[1].break_now()
        why = await asyncio.wait_for(pool.failure(), 10)
        assert why == "inference worker 1 was killed by SIGKILL (the last of 5 failures in a row)"
        with pytest.raises(EngineFailure, match="worker 1"):
            await reply_of(pool)
        with pytest.raises(EngineFailure, match="worker 1"):
            await pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)


async def test_a_start_that_takes_long_is_no_time_in_which_the_worker_has_served(monkeypatch):
    """A server takes a minute to start, so that one that dies whenever it serves would be started again for ever."""
    monkeypatch.setattr(keeper, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(keeper, "STEADY_SECONDS", 0.05)
    house = Glasshouse()
    start = house.start

    async def slow(number):
        await asyncio.sleep(0.1)
        return await start(number)

    house.start = slow
    async with pool_of(house, replicas=1) as pool:
        house.on_start = lambda engine: asyncio.get_running_loop().call_later(0.005, engine.break_now)
        house.started[0].break_now()
        why = await asyncio.wait_for(pool.failure(), 10)
        assert why == "inference worker 0 was killed by SIGKILL (the last of 5 failures in a row)"


async def test_a_start_that_takes_longer_than_it_may_is_a_failure(monkeypatch):
    monkeypatch.setattr(keeper, "BACKOFF_SECONDS", 0.001)
    house = Glasshouse()

    async def never(number):
        await asyncio.Event().wait()

    house.start = never
    with pytest.raises(EngineFailure, match=r"0.*0\.05.*5"):
        async with pool_of(house, replicas=1, start_seconds=0.05):
            pass


async def test_a_pool_that_can_not_start_says_so_and_leaves_nothing():
    house = Glasshouse(fails=[ConfigError("there is no such model")])
    with pytest.raises(ConfigError, match="such model"):
        async with pool_of(house):
            pytest.fail("it has started")
    assert house.alive == []


async def test_a_pool_grows_and_shrinks_without_losing_a_reply():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.sync_weights("policy", PolicyVersion(0, 4), WEIGHTS)
        calls = [asyncio.ensure_future(reply_of(pool, seed)) for seed in range(12)]
        await pool.resize(4)
        assert [worker.versions for worker in pool.load().workers] == [{"policy": "0.4"}] * 4
        calls += [asyncio.ensure_future(reply_of(pool, seed)) for seed in range(12, 24)]
        await asyncio.sleep(0.002)
        await asyncio.wait_for(pool.resize(1), 10)
        assert len(house.alive) == len(pool.load().workers) == 1
        assert await asyncio.gather(*calls) == [await expected(seed) for seed in range(24)]


def gated(house):
    """Let the starts of a house wait, from now on, until the event of their worker's number is set."""
    gates, broken_off, start = defaultdict(asyncio.Event), [], house.start

    async def waits(number):
        try:
            await gates[number].wait()
        except asyncio.CancelledError:
            broken_off.append(number)
            raise
        return await start(number)

    house.start = waits
    return gates, broken_off


@asynccontextmanager
async def gated_pool():
    """A pool of two workers, those that are added wait to be let start; with their gates."""
    house = Glasshouse()
    gates, broken_off = gated(house)
    gates[0].set()
    gates[1].set()
    async with pool_of(house) as pool:
        yield pool, house, gates, broken_off


async def test_a_change_of_the_number_that_another_one_overtakes_is_refused_and_its_start_is_broken_off():
    async with gated_pool() as (pool, house, _, broken_off):
        more = asyncio.ensure_future(pool.resize(3))
        await until(lambda: len(pool.load().workers) == 3)
        await asyncio.wait_for(pool.resize(1), 10)
        assert broken_off == [2]
        with pytest.raises(Conflict, match=r"3.*overtaken.*1"):
            await asyncio.wait_for(more, 10)
        assert len(pool.load().workers) == len(house.alive) == 1
        assert pool.load().workers[0].restarts == 0


async def test_a_start_that_a_later_change_still_wants_goes_on():
    async with gated_pool() as (pool, _, gates, broken_off):
        first = asyncio.ensure_future(pool.resize(3))
        await until(lambda: len(pool.load().workers) == 3)
        second = asyncio.ensure_future(pool.resize(4))
        with pytest.raises(Conflict, match=r"overtaken.*4"):
            await asyncio.wait_for(first, 10)
        gates[2].set()
        gates[3].set()
        await asyncio.wait_for(second, 10)
        assert [worker.name[-1] for worker in pool.load().workers] == ["0", "1", "2", "3"]
        assert not broken_off


async def test_a_change_goes_on_without_its_caller_and_may_be_asked_for_again():
    async with gated_pool() as (pool, _, gates, broken_off):
        gone = asyncio.ensure_future(pool.resize(3))
        await until(lambda: len(pool.load().workers) == 3)
        await cancelled(gone)
        again = asyncio.ensure_future(pool.resize(3))
        await asyncio.sleep(0)
        gates[2].set()
        await asyncio.wait_for(again, 10)
        assert len(pool.load().workers) == 3
        assert not broken_off


async def test_workers_that_are_added_start_one_after_another():
    async with gated_pool() as (pool, house, gates, _):
        change = asyncio.ensure_future(pool.resize(4))
        for number in (2, 3):
            await until(lambda number=number: len(pool.load().workers) == number + 1)
            await asyncio.sleep(0.01)
            assert (len(pool.load().workers), len(house.alive)) == (number + 1, number)
            gates[number].set()
        await asyncio.wait_for(change, 10)


@pytest.mark.parametrize(
    "error", [EngineFailure("it was killed by SIGKILL"), ModelError("no such file"), ValueError("a defect")]
)
async def test_a_worker_that_is_added_and_does_not_start_fails_the_change_alone(error):
    house = Glasshouse()
    async with pool_of(house) as pool:
        house.fails.append(error)
        with pytest.raises(PalestraError, match=str(error)):
            await asyncio.wait_for(pool.resize(4), 10)
        assert [worker.state for worker in pool.load().workers] == ["ready", "ready"]
        assert str(error) in await asyncio.wait_for(pool.next_loss(), 10)
        assert await reply_of(pool) == await expected(3)
        await asyncio.wait_for(pool.resize(3), 10)
        assert len(pool.load().workers) == 3


async def test_a_worker_that_is_added_and_dies_before_it_serves_fails_the_change_alone():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.sync_weights("policy", PolicyVersion(0, 1), WEIGHTS)
        house.on_start = lambda engine: setattr(engine, "dies_in_update", True)
        with pytest.raises(EngineFailure, match=r"inference worker 2 .*(SIGKILL|has died)"):
            await asyncio.wait_for(pool.resize(3), 10)
        assert [worker.restarts for worker in pool.load().workers] == [0, 0]


async def test_workers_for_which_there_is_no_room_are_refused_and_none_is_started():
    house, asked = Glasshouse(), []

    async def check_capacity(count):
        asked.append(count)
        if count > 2:
            raise Conflict("6.3 GiB are missing")

    async with pool_of(house, check_capacity=check_capacity) as pool:
        assert not asked
        with pytest.raises(Conflict, match="missing"):
            await pool.resize(8)
        assert len(house.started) == 2
        await asyncio.wait_for(pool.resize(3), 10)
        await asyncio.wait_for(pool.resize(1), 10)
        assert asked == [6, 1]


@pytest.mark.parametrize(
    ("found", "why", "said"),
    [
        (False, "was killed by SIGKILL", "inference worker 1 was killed by SIGKILL; another one is started"),
        (True, "the engine has ended", "inference worker 1: the engine has ended; it is used again when it answers"),
    ],
)
async def test_a_worker_that_is_lost_is_told_to_those_who_run_the_job(found, why, said):
    house = Glasshouse(found=found)
    async with pool_of(house) as pool:
        house.started[1].break_now(why)
        assert await asyncio.wait_for(pool.next_loss(), 10) == said


async def test_a_change_ends_with_the_pool():
    async with gated_pool() as (pool, house, _, _):
        more = asyncio.ensure_future(pool.resize(3))
        await until(lambda: len(pool.load().workers) == 3)
        await asyncio.wait_for(pool.close(), 10)
        with pytest.raises(EngineFailure, match="stopped"):
            await asyncio.wait_for(more, 10)
        assert not house.alive


async def test_closing_fails_the_calls_that_are_open_and_ends_all_workers():
    house = Glasshouse()
    async with pool_of(house) as pool:
        await pool.pause()
        calls = [asyncio.ensure_future(reply_of(pool, seed)) for seed in range(4)]
        await until(lambda: pool.load().waiting == 4)
        await pool.close()
        for call in calls:
            with pytest.raises(EngineFailure):
                await asyncio.wait_for(call, 10)
        assert house.alive == []
        with pytest.raises(EngineFailure, match="stopped"):
            await reply_of(pool)


async def test_a_score_whose_worker_dies_is_computed_by_another():
    house = Glasshouse()
    async with pool_of(house) as pool:

        async def dies(policy, prompt):
            house.started[0].break_now()
            raise EngineFailure("the worker has died")

        house.started[0].score = dies
        assert await pool.score("policy", TokenSequence(PROMPT)) == [-1.0] * 63


async def test_a_defect_in_the_start_of_a_worker_ends_the_pool_with_a_line():
    """Nobody would wait for a worker that nobody starts again."""
    house = Glasshouse(fails=[ValueError("invalid literal for int()\nwith base 10: '²'")])
    said = r"0.*ValueError.*10.*'²'"
    with pytest.raises(EngineFailure, match=said):
        async with pool_of(house):
            raise AssertionError("it is open")


async def test_a_worker_that_can_not_be_watched_is_replaced():
    house = Glasshouse()

    async def failure():
        raise OverflowError("cannot convert float infinity to integer")

    house.on_start = lambda engine: setattr(engine, "failure", failure) if len(house.started) == 1 else None
    async with pool_of(house, replicas=1) as pool:
        await until(lambda: len(house.started) == 2)
        assert await reply_of(pool) == await expected(3)
