from __future__ import annotations

import asyncio

import pytest

from palestra.rollout.orchestrator import RolloutOrchestrator


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def all_batches(orchestrator, size, pause=0.0):
    found = []
    async for batch in orchestrator.yield_batches(size):
        found.append(batch)
        await asyncio.sleep(pause)
    return found


@pytest.mark.parametrize("pause", [0.0, 0.001])
async def test_a_finite_stream_is_delivered_whole_also_to_a_slow_reader(pause):
    orchestrator = RolloutOrchestrator(double, max_concurrency=16, max_waiting_results=2)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(range(1000)))
    batches = await all_batches(orchestrator, 7, pause)
    await running
    assert sorted(outcome.result for batch in batches for outcome in batch) == [2 * n for n in range(1000)]
    assert [len(batch) for batch in batches] == [7] * 142 + [6]
    assert orchestrator.counts == {"done": 1000}


async def test_outcomes_of_a_group_come_together_whatever_the_order_in_which_they_end():
    async def play(piece):
        group, member = piece
        await asyncio.sleep(0.001 * (member * 7 % 4))
        if (group, member) == (1, 2):
            raise ValueError("no reward")
        return group

    work = [(group, member) for member in range(4) for group in range(5)] + [(9, 0)]
    orchestrator = RolloutOrchestrator(play, max_concurrency=21, max_waiting_results=2)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(work))
    groups = [found async for found in orchestrator.yield_groups(4, lambda piece: piece[0])]
    await running
    assert [len(found) for found in groups] == [4, 4, 4, 4, 4, 1]
    assert [{outcome.work[0] for outcome in found} for found in groups[:5]] == [
        {found[0].work[0]} for found in groups[:5]
    ]
    assert sorted(outcome.work for found in groups for outcome in found) == sorted(work)
    (failed,) = [outcome for found in groups for outcome in found if outcome.error is not None]
    assert failed.work == (1, 2), "a failure is a member of its group"
    assert groups[5][0].work == (9, 0), "a group that has remained smaller comes at the end"


async def test_no_more_is_played_at_once_than_allowed_and_nothing_is_taken_that_nobody_reads():
    playing = most = taken = 0

    async def stream():
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    async def play(number):
        nonlocal playing, most
        playing += 1
        most = max(most, playing)
        await asyncio.sleep(0)
        playing -= 1

    orchestrator = RolloutOrchestrator(play, max_concurrency=5, max_waiting_results=3)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(stream()))
    for _ in range(200):
        await asyncio.sleep(0)
    assert most == 5
    assert taken <= 5 + 3 + 1
    assert orchestrator.waiting == 3
    assert sum(len(batch) for batch in await all_batches(orchestrator, 10)) == 100
    await running


async def test_failures_and_time_outs_are_outcomes_and_the_others_go_on():
    ended = []

    async def play(number):
        if number == 3:
            raise ValueError("three")
        try:
            await asyncio.sleep(60 if number == 5 else 0)
        finally:
            ended.append(number)
        return number

    orchestrator = RolloutOrchestrator(play, max_concurrency=4, timeout_seconds=0.05)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(range(8)))
    outcomes = {o.work: o for batch in await all_batches(orchestrator, 3) for o in batch}
    await running
    assert isinstance(outcomes[3].error, ValueError)
    assert isinstance(outcomes[5].error, TimeoutError)
    assert 5 in ended  # the work itself was ended
    assert orchestrator.counts == {"done": 6, "failed": 1, "timed_out": 1}


async def test_cancelling_ends_what_is_played_and_those_who_read():
    begun, ended = asyncio.Queue(), []

    async def play(number):
        begun.put_nowait(number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    orchestrator = RolloutOrchestrator(play, max_concurrency=3)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(range(10)))
    reading = asyncio.ensure_future(all_batches(orchestrator, 2))
    for _ in range(3):
        await asyncio.wait_for(begun.get(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.wait_for(reading, 2) == []
    assert sorted(ended) == [0, 1, 2]


async def test_a_stream_that_fails_is_an_error_of_the_run_after_what_it_gave():
    def stream():
        yield 1
        raise OSError("disk")

    orchestrator = RolloutOrchestrator(double, max_concurrency=1)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(stream()))
    assert [o.result for batch in await all_batches(orchestrator, 5) for o in batch] == [2]
    with pytest.raises(OSError, match="disk"):
        await running


async def test_a_reader_that_stops_does_not_keep_the_run_from_being_cancelled():
    orchestrator = RolloutOrchestrator(double, max_concurrency=2, max_waiting_results=1)
    running = asyncio.ensure_future(orchestrator.run_producers_from_stream(range(100)))
    async for _ in orchestrator.yield_batches(1):
        break
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 2)
