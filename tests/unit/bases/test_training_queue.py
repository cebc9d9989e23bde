"""Requests of tenants behind one queue: order, pieces, shares, failures, cancellation and removal."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import GSPOLoss
from palestra.config import AdapterConfig
from palestra.errors import ConfigError, InvalidAlgorithm, NotFound
from palestra.trainer.base import OptimParams, PolicySpec
from palestra_bases.training.queue import REQUEST_TOKENS, TrainingQueue
from palestra_bases.training.tenant_trainer import TenantTrainer
from unit.bases.test_merged import LOSSES, PARAMS, TINY, VALUE, Tenants, rows, tenants_of
from unit.trainer.test_critic import same

SMALL = {"micro_batch_tokens": 24}


def many(name: str, times: int) -> list:
    """A batch of many micro-batches: rows of different episodes, which share nothing."""
    found = []
    for number in range(times):
        for row in rows(name, 0):
            ids = row.ids.copy()
            ids[0] = number % 200
            found.append(replace(row, ids=ids, episode_id=f"{row.episode_id}-{number}"))
    return found


@asynccontextmanager
async def watched(*names: str, **config):
    """Tenants, and the passes that the trainer computes: the policies of each, and `update` of whom."""
    async with tenants_of(*names, **config) as tenants:
        passes, trainer = [], tenants.trainer
        compute, update = trainer.compute, trainer.optim_step

        async def watched_compute(pieces):
            passes.append(sorted(name.partition("/")[0] for name in pieces))
            return await compute(pieces)

        async def watched_update(name, *given):
            passes.append([f"update {name.partition('/')[0]}"])
            return await update(name, *given)

        trainer.compute, trainer.optim_step = watched_compute, watched_update
        yield tenants, passes


async def step(tenants: Tenants, name: str, number: int = 0) -> None:
    await tenants.of(name).forward_backward("p", rows(name, number), LOSSES[name], f"g{number}")
    await tenants.of(name).optim_step("p", PARAMS[name], f"u{number}")


async def test_a_small_tenant_waits_for_one_piece_of_a_large_one():
    async with watched("a", "b", **SMALL) as (tenants, passes):
        large = asyncio.create_task(tenants.of("a").forward_backward("p", many("a", 6), LOSSES["a"], "large"))
        while len(passes) < 2:
            await asyncio.sleep(0.001)
        before = len(passes)
        await step(tenants, "b")  # its update is sent when it has the report
        done = passes[before : passes.index(["update b"]) + 1]
        assert not large.done()
        mine = [one for one in done if one != ["a"]]
        assert len(mine) > 1
        assert done.count(["a"]) <= 1  # one that had begun
        assert done[-len(mine) :] == mine  # and none between the gradient and the update
        report = await large
        assert report.rows == len(many("a", 6))
        assert passes.count(["a"]) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"), [("a", LOSSES["a"]), ("b", LOSSES["b"]), ("c", VALUE), ("c", LossSpec.of(GSPOLoss()))], ids=str
)
async def test_a_batch_in_pieces_between_those_of_others_is_bit_for_bit_the_whole_one(name, loss):
    batch = many(name, 3)
    split = [replace(row, episode_id=f"whole-{number % 2}") for number, row in enumerate(batch)]
    chosen = split if loss.name == GSPOLoss().name else batch
    async with tenants_of(name, **SMALL) as one:
        wanted = await one.trainer.forward_backward(f"{name}/p", chosen, loss, "g", logprobs=True)
        numbers = await one.trainer.forward(f"{name}/p", chosen, ["old_logprobs"])
        state = await one.state(name)
        critic = [] if name != "c" else one.policy("c")._critic.optimizer.gradient()
    async with tenants_of(name, "full", **SMALL) as tenants:
        found, *_, again = await asyncio.gather(
            tenants.of(name).forward_backward("p", chosen, loss, "g", logprobs=True),
            *(tenants.of("full").forward_backward("p", many("full", 2), LOSSES["full"], f"g{n}") for n in range(4)),
            tenants.of(name).forward("p", chosen, ["old_logprobs"]),
        )
        assert repr(found) == repr(wanted)
        assert same(await tenants.state(name), state)
        assert repr(again) == repr(numbers)
        if name == "c":
            for mine, other in zip(tenants.policy("c")._critic.optimizer.gradient(), critic, strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or bool((mine == other).all())


async def test_gradients_of_tenants_are_one_pass_and_their_updates_follow():
    async with watched("a", "b", "c", deterministic=False, micro_batch_tokens=1024) as (tenants, passes):
        await asyncio.gather(*(step(tenants, name) for name in "abc"))
        assert passes[0] == ["a", "b", "c"]
        assert sorted(passes[1:]) == [["update a"], ["update b"], ["update c"]]


@pytest.mark.slow
async def test_shares_of_tokens_follow_the_weights():
    async with tenants_of("a", "b", **SMALL) as tenants:
        queue = tenants.queue
        queue.add_tenant("b", 3.0)
        both = [
            asyncio.create_task(tenants.of(name).forward_backward("p", many(name, 40), LOSSES[name], "g"))
            for name in "ab"
        ]
        seen = []
        while not any(task.done() for task in both):
            await asyncio.sleep(0.002)
            seen.append([one.tokens / one.weight for one in queue.load().tenants])
        await asyncio.gather(*both)
        bound = 2 * 4 * 24 + 2 * 2 * 24  # two quanta and two pieces: the tenants had no empty accounts at first
        assert max(abs(mine - other) for mine, other in seen) <= bound
        assert sum(seen[-1]) > 10 * bound / 4


async def test_failures_stay_with_their_request():
    async with tenants_of("a", "b", deterministic=False) as tenants:
        wrong = [replace(row, advantages=np.full_like(row.advantages, np.nan)) for row in rows("a", 0)]
        first = [replace(row, loss_mask=np.ones_like(row.loss_mask)) for row in rows("a", 0)]
        mine, other = tenants.of("a"), tenants.of("b")
        found = await asyncio.gather(
            mine.forward_backward("p", wrong, LOSSES["a"], "nan"),
            mine.forward_backward("p", rows("a", 0), LossSpec(name="none"), "unknown"),
            mine.forward_backward("p", rows("a", 0), VALUE, "critic"),
            mine.forward_backward("p", first, LOSSES["a"], "first"),
            mine.forward_backward("q", rows("a", 0), LOSSES["a"], "other"),
            mine.optim_step("p", PARAMS["a"], "critic", "critic"),
            other.forward_backward("p", rows("b", 0), LOSSES["b"], "g"),
            mine.forward_backward("p", rows("a", 0), LOSSES["a"], "g"),
            return_exceptions=True,
        )
        kinds = [InvalidAlgorithm, ConfigError, ConfigError, ValueError, NotFound, ConfigError]
        for one, kind in zip(found, kinds, strict=False):
            assert isinstance(one, kind), one
        assert [report.rows for report in found[6:]] == [len(rows("b", 0)), len(rows("a", 0))]
        again = await mine.forward_backward("p", rows("a", 1), LOSSES["a"], "nan")  # one that failed may be repeated
        assert again.rows == len(rows("a", 1))


async def test_no_tenant_can_name_the_policy_of_another():
    async with tenants_of("a", "b") as tenants:
        for name in ("a/p", "../a/p", "/a/p", "a"):
            with pytest.raises(NotFound):
                tenants.of("b").version(name)
            with pytest.raises(NotFound):
                await tenants.of("b").weights(name)
        for tenant in ("b/..", "", "a/p"):
            with pytest.raises(ConfigError):
                tenants.queue.add_tenant(tenant)
        for weight in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match="be positive"):
                tenants.queue.add_tenant("c", weight)
        with pytest.raises(NotFound, match=r"tenant.*'c'"):
            await TenantTrainer(tenants.queue, "c").create("p", PolicySpec(model=TINY))


async def test_a_caller_that_goes_away_leaves_its_request_and_a_repeated_one_gets_the_first_answer():
    async with watched("a", **SMALL) as (tenants, passes):
        mine = tenants.of("a")
        asked = [
            asyncio.create_task(mine.forward_backward("p", many("a", 3), LOSSES["a"], "g")),
            asyncio.create_task(mine.optim_step("p", PARAMS["a"], "u")),
        ]
        while not passes:
            await asyncio.sleep(0.001)
        for task in asked:
            task.cancel()
        found = await asyncio.gather(
            mine.forward_backward("p", many("a", 3), LOSSES["a"], "g"), mine.optim_step("p", PARAMS["a"], "u")
        )
        assert found[0].rows == len(many("a", 3))
        assert found[1].applied
        assert mine.version("p").n == 1
        computed = len(passes)
        assert await mine.forward_backward("p", many("a", 3), LOSSES["a"], "g") == found[0]
        assert len(passes) == computed
    assert computed < 2 * len(many("a", 3))


@pytest.mark.slow
async def test_a_flood_of_small_requests_keeps_nobody_waiting():
    async with tenants_of("a", "b") as tenants:
        flood = [asyncio.create_task(tenants.of("a").weights("p")) for _ in range(1000)]
        await asyncio.sleep(0)
        await step(tenants, "b")
        answered = sum(task.done() for task in flood)
        assert answered <= 2 * 4 * 1024 / REQUEST_TOKENS
        assert tenants.queue.load().tenants[0].waiting == 1000 - answered
        await asyncio.gather(*flood)
        assert tenants.queue.load().tenants[0].waiting == 0


async def test_a_policy_is_removed_after_the_requests_before_and_its_name_begins_anew():
    async with tenants_of("a", "b", **SMALL) as tenants:
        mine = tenants.of("a")
        spec = PolicySpec(model=TINY, adapter=AdapterConfig(rank=2))
        before, _, after, _, anew = await asyncio.gather(
            mine.forward_backward("p", many("a", 2), LOSSES["a"], "g"),
            mine.remove("p"),
            mine.optim_step("p", OptimParams(learning_rate=1.0), "u"),
            mine.create("p", spec),
            mine.forward_backward("p", rows("a", 0), LOSSES["a"], "g"),
            return_exceptions=True,
        )
        assert before.rows == len(many("a", 2))
        assert isinstance(after, NotFound)
        assert anew.rows == len(rows("a", 0))
        assert mine.version("p").n == 0
        await mine.close()
        with pytest.raises(NotFound):
            mine.version("p")
        assert tenants.of("b").version("p").n == 0


async def test_a_tenant_is_removed_in_the_middle_of_its_requests_and_can_come_back():
    async with watched("a", "b", **SMALL) as (tenants, passes):
        asked = [
            asyncio.create_task(tenants.of("a").forward_backward("p", many("a", 3), LOSSES["a"], f"g{number}"))
            for number in range(3)
        ]
        made = asyncio.create_task(tenants.of("a").create("q", PolicySpec(model=TINY)))
        other = asyncio.create_task(step(tenants, "b"))
        while not passes:
            await asyncio.sleep(0.001)
        await tenants.queue.remove_tenant("a")
        for task in (*asked, made):
            with pytest.raises(NotFound, match=r"'a'.*removed"):
                await task
        assert [name for name in tenants.trainer._policies if name.startswith("a/")] == []
        await other
        with pytest.raises(NotFound):
            await tenants.of("a").weights("p")
        tenants.queue.add_tenant("a")
        await tenants.of("a").create("p", PolicySpec(model=TINY, adapter=AdapterConfig(rank=2)))
        report = await tenants.of("a").forward_backward("p", rows("a", 0), LOSSES["a"], "g0")
        assert report.rows == len(rows("a", 0))


async def test_the_load_says_who_waits_and_for_how_long():
    async with tenants_of("a", "b") as tenants:
        now = [10.0]
        queue = TrainingQueue(tenants.trainer, clock=lambda: now[0])
        for name in "ab":
            queue.add_tenant(name, 2.0)
        tasks = [asyncio.create_task(TenantTrainer(queue, "a").weights("p")) for _ in range(2)]
        await asyncio.sleep(0)
        now[0] = 12.5
        first, second = queue.load().tenants
        assert (first.tenant, first.weight, first.waiting, first.longest_wait) == ("a", 2.0, 2, 2.5)
        assert (second.waiting, second.longest_wait, second.tokens) == (0, 0.0, 0)
        await asyncio.gather(*tasks)
        assert queue.load().tenants[0].tokens == 2 * REQUEST_TOKENS


async def test_a_tenant_that_comes_back_and_is_removed_again_fails_no_other():
    async with tenants_of("a", "b", **SMALL) as tenants:
        queue = tenants.queue
        work = asyncio.create_task(tenants.of("b").forward_backward("p", many("b", 6), LOSSES["b"], "g"))
        queue._shares.charge("a", 10**6)  # so that its removals wait for others
        first = asyncio.create_task(queue.remove_tenant("a"))
        await asyncio.sleep(0)
        queue.add_tenant("a")
        second = asyncio.create_task(queue.remove_tenant("a"))
        report, *_ = await asyncio.gather(work, first, second)
        assert report.rows == len(many("b", 6))
        assert not queue._shares._accounts.keys() & {"a"}
        queue.add_tenant("a")
        await tenants.of("a").create("p", PolicySpec(model=TINY, adapter=AdapterConfig(rank=2)))
        await step(tenants, "a")
