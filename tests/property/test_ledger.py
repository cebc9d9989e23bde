"""A ledger never lets more be spent than its limits, and loses nothing, whatever calls do."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.building import FakeClock

from palestra.config.budget import UNITS, TokenPrice
from palestra.errors import BudgetSpent
from palestra.store.ledger import END_MS, Allowance, BudgetAmounts, Ledger, Limits

BIG = 10**30
TOKENS = st.one_of(st.integers(0, 50), st.integers(0, BIG))
PRICES = {"cheap": TokenPrice(1, 3), "dear": TokenPrice(7 * UNITS, BIG), "Ω\N{PILE OF POO}\u202e": TokenPrice(0, 1)}
CALLS = st.lists(
    st.tuples(
        st.sampled_from([*PRICES, "free"]),
        TOKENS,  # of the prompt
        TOKENS,  # most of the reply
        st.fractions(0, 1),  # share of it that is used
        st.integers(0, 3),  # turns of the event loop for which it is sampled
        st.booleans(),  # whether it is aside of the job's work
        st.one_of(st.none(), st.none(), st.integers(0, 6)),  # turns of the event loop after which it is cancelled
    ),
    max_size=12,
)


def check(ledger: Ledger) -> None:
    """What is spent and what may still be spent are within the limits."""
    total = ledger.total
    assert ledger._held_tokens >= 0 <= ledger._held_money
    reserved = (total.tokens + ledger._held_tokens, total.money + ledger._held_money)
    for used, limit in zip(reserved, ledger.limits[:2], strict=True):
        assert limit is None or used <= limit


@settings(max_examples=150, deadline=None)
@given(
    calls=CALLS,
    tokens=st.one_of(st.none(), st.integers(1, 200), st.integers(1, BIG)),
    money=st.one_of(st.none(), st.integers(1, 500), st.integers(1, BIG**2)),
    refuses=st.booleans(),
)
def test_nothing_is_exceeded_and_nothing_leaks(calls, tokens, money, refuses):
    ended: list[None] = []
    ledger = Ledger(
        limits=Limits(tokens=tokens, money=money),
        monotonic=FakeClock().monotonic,
        prices=PRICES,
        refuses=refuses,
        on_over=lambda: ended.append(None),
    )
    used: list[tuple[str, int, int]] = []

    async def call(payee, prompt, most, share, turns, aside, _) -> None:
        reply = int(most * share)
        try:
            hold = await ledger.hold(payee, prompt, most, aside=aside)
        except BudgetSpent:
            assert aside or refuses
            return
        check(ledger)
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        finally:
            ledger.settle(hold, prompt, reply)
            used.append((payee, prompt, reply))
        check(ledger)

    async def all_calls() -> None:
        tasks = [asyncio.create_task(call(*each)) for each in calls]
        for turn in range(60):
            for task, (*_, end) in zip(tasks, calls, strict=True):
                if end == turn:
                    task.cancel()
            await asyncio.sleep(0)
        left = [task for task in tasks if not task.done()]
        assert not left or (ledger.over and not refuses)  # they wait for the end of the job
        for task in left:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(all_calls())
    assert ledger._held_tokens == ledger._held_money == 0
    assert ledger.total.tokens == sum(prompt + reply for _, prompt, reply in used)
    free = TokenPrice(0, 0)
    assert ledger.total.money == sum(PRICES.get(payee, free).of(prompt, reply) for payee, prompt, reply in used)
    assert len(ended) == ledger.over
    assert not ledger.over or not all(aside for *_, aside, _ in calls)


async def test_a_refused_call_that_is_cancelled_at_the_same_moment_gives_nothing_back():
    ledger = Ledger(limits=Limits(tokens=100), monotonic=FakeClock().monotonic, refuses=True)
    call = asyncio.create_task(ledger.hold("policy", 60, 60))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(call.cancel)  # it is refused in the same turn
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ledger._held_tokens == 0


async def test_a_step_begins_though_calls_in_flight_have_reserved_most_of_the_budget():
    ledger = Ledger(limits=Limits(tokens=1000), monotonic=FakeClock().monotonic)
    assert ledger.begin_step()
    ledger.settle(await ledger.hold("policy", 40, 60), 40, 60)
    flying = await ledger.hold("policy", 100, 750)
    assert ledger.begin_step()
    ledger.settle(flying, 100, 750)
    assert not ledger.begin_step()  # the last one took 850


def test_the_time_that_is_kept_for_the_end_is_that_of_the_longest_step():
    ledger = Ledger(limits=Limits(ms=100_000), monotonic=FakeClock().monotonic)
    ledger.keep_for_end(1)
    assert ledger.end_ms == END_MS
    ledger.keep_for_end(20)  # this one saved a checkpoint
    ledger.keep_for_end(10)
    assert ledger.end_ms == 30_000


@given(spent=st.integers(0, BIG), limit=st.integers(1, BIG), call=st.integers(1, BIG))
@settings(max_examples=50, deadline=None)
def test_a_call_fits_as_long_as_the_sums_of_the_store_leave_room(spent, limit, call):
    ledger = Ledger(
        limits=Limits(tokens=limit), monotonic=FakeClock().monotonic, spent=BudgetAmounts(tokens=spent), refuses=True
    )

    async def one() -> None:
        await ledger.hold("policy", call, 0)

    if spent + call <= limit:
        asyncio.run(one())
        assert not ledger.over
    else:
        with pytest.raises(BudgetSpent):
            asyncio.run(one())
        assert ledger.over == (spent + 2 > limit)  # otherwise a smaller call still fits


async def test_a_served_call_that_is_larger_than_all_before_is_refused_and_smaller_ones_go_on():
    ended: list[None] = []
    limits = Limits(tokens=100)
    clock = FakeClock()
    ledger = Ledger(limits=limits, monotonic=clock.monotonic, refuses=True, on_over=lambda: ended.append(None))
    with pytest.raises(BudgetSpent):
        await ledger.hold("policy", 10, 500)
    ledger.settle(await ledger.hold("policy", 20, 40), 20, 40)
    with pytest.raises(BudgetSpent):
        await ledger.hold("policy", 20, 41)
    assert not ended
    with pytest.raises(BudgetSpent):
        await ledger.hold("policy", 20, 40)  # one like this was served
    assert ended == [None]


@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=8),
    calls=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    own=st.one_of(st.none(), st.integers(1, 200)),
)
@settings(max_examples=50, deadline=None)
def test_a_job_spends_no_more_than_its_allowance_and_waits_for_more_until_it_is_the_last(parts, calls, own):
    ledger = Ledger(limits=Limits(tokens=own), monotonic=FakeClock().monotonic)

    async def call(tokens: int) -> None:
        ledger.settle(await ledger.hold("policy", tokens, 0), tokens, 0)

    async def play() -> None:
        given_ = 0
        ledger.allow(Allowance(Limits(tokens=0), of="tenant blue"))
        tasks = [asyncio.create_task(call(tokens)) for tokens in calls]
        for more, _ in parts:
            given_ += more
            ledger.allow(Allowance(Limits(tokens=given_), of="tenant blue"))
            for _ in range(9):
                await asyncio.sleep(0)
            assert ledger.total.tokens + ledger._held_tokens <= min(given_, own or given_)
        waits = not all(task.done() for task in tasks)
        assert not ledger.over or own is not None
        wanted, over = ledger.wanted.tokens, ledger.over
        ledger.allow(Allowance(Limits(tokens=given_), last=True, of="tenant blue"))
        assert ledger.over == waits
        if waits and not over:
            assert wanted > given_ or (own is not None and wanted > own)
            assert ledger.shared_over
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())


def test_time_costs_money_and_the_end_of_the_job_has_its_share():
    clock, ended = FakeClock(), []
    ledger = Ledger(
        limits=Limits(money=100_000, ms=60_000),
        monotonic=clock.monotonic,
        device_ms=5,
        end_ms=1000,
        on_over=lambda: ended.append(None),
    )
    assert ledger.left_ms() == 20_000  # the money of devices, before the hours
    assert ledger.begin_step()
    clock.advance(8)
    assert ledger.total == BudgetAmounts(0, 40_000, 8000)
    assert ledger.begin_step()
    clock.advance(8)
    assert not ledger.begin_step()  # another 8 s would take 120,000
    ledger.end()
    ledger.end()
    assert ended == [None]
