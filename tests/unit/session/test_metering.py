"""Calls within a budget: what each uses is counted once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from palestra.engine.fake import FakeEngine
from palestra.errors import BudgetSpent
from palestra.session import StatelessSession
from palestra.store.ledger import Ledger, Limits
from palestra.store.spending import Metering, sums, sums_by_episode
from unit.session.conftest import call


def metered(bench, limit: int | None = None, refuses: bool = False) -> Ledger:
    """The ledger of the bench's sessions from now on."""
    ledger = Ledger(limits=Limits(tokens=limit), monotonic=bench.clock.monotonic, refuses=refuses)
    bench.context = replace(bench.context, metering=Metering(ledger, bench.store.spending))
    return ledger


async def used(bench) -> int:
    await asyncio.sleep(0.05)  # what is recorded without anybody waiting
    return sum(one.prompt_tokens + one.reply_tokens for one in await bench.store.db.read(sums))


async def test_a_call_gives_back_what_it_did_not_use(bench):
    ledger = metered(bench, 10_000)
    session = await bench.session()
    chat = await session.generate_one(call("hello"))
    assert ledger.total.tokens == chat.prompt_tokens + len(chat.completion_ids) == await used(bench)
    assert ledger._held_tokens == 0
    (one,) = await bench.store.db.read(sums_by_episode)
    assert (one.episode_id, one.kind, one.payee, one.calls) == (session.episode_id, "train", "policy", 1)


async def test_a_call_that_is_broken_off_counts_with_what_was_sampled(bench):
    ledger = metered(bench, 10_000)
    session = await bench.session()
    session._context.policies.runtime("policy").engine._piece = 1
    session._context.policies.runtime("policy").engine._piece_delay = 0.01
    bench.script = lambda ids, sampling: [ord("7")] * 40
    task = asyncio.create_task(session.generate_one(call("hello")))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ledger._held_tokens == 0
    assert await used(bench) == ledger.total.tokens
    (one,) = await bench.store.db.read(sums_by_episode)
    assert 0 < one.reply_tokens < 40


async def test_a_call_whose_lease_is_over_counts(bench):
    ledger = metered(bench, 10_000)
    session = await bench.session()
    really = bench.script

    def ends(ids, sampling):
        bench.store.db.submit(lambda c: c.exec_driver_sql("UPDATE episodes SET fence = 9"))
        return really(ids, sampling)

    bench.script = ends
    with pytest.raises(Exception, match="episode"):
        await session.generate_one(call("hello"))
    assert 0 < await used(bench) == ledger.total.tokens


async def test_a_call_that_does_not_fit_waits_and_one_outside_of_training_is_refused(bench):
    metered(bench, 60)
    session = await bench.session()
    waiting = asyncio.create_task(session.generate_one(call("hello")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert isinstance(bench.engine, FakeEngine)
    assert bench.engine.calls == 0
    bench.context.metering.ledger.close()  # the job is over
    with pytest.raises(BudgetSpent):
        await waiting
    ledger = metered(bench, 60)
    with pytest.raises(BudgetSpent):  # and the job goes on
        await StatelessSession(bench.context).generate_one(call("hello"))
    assert not ledger.over
    metered(bench, 60, refuses=True)
    with pytest.raises(BudgetSpent):
        await StatelessSession(bench.context).generate_one(call("hello"))
    assert await used(bench) == 0


async def test_calls_outside_of_episodes_are_counted_before_they_are_returned(bench):
    ledger = metered(bench)
    chat = await StatelessSession(bench.context).generate_one(call("hello"))
    (one,) = await bench.store.db.read(sums)
    assert (one.kind, one.episode_id) == ("adhoc", "")
    assert one.prompt_tokens + one.reply_tokens == ledger.total.tokens == chat.prompt_tokens + len(chat.completion_ids)
