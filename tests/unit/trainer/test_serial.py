from __future__ import annotations

import asyncio

import numpy as np
import pytest

from palestra.errors import Expired
from palestra.trainer.base import StepReport
from palestra.trainer.serial import REMEMBERED, KnownRequests, Serial


class Work:
    """Counts its runs; waits until it may go on; fails as often as it is told to."""

    def __init__(self, fail: int = 0, waiting: bool = False) -> None:
        self.runs, self.at_once, self.most_at_once = 0, 0, 0
        self._fail = fail
        self.go = asyncio.Event()
        if not waiting:
            self.go.set()

    async def __call__(self) -> int:
        self.runs += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
            if self.runs <= self._fail:
                raise RuntimeError(f"run {self.runs}")
            return self.runs * 10
        finally:
            self.at_once -= 1


async def test_a_repeated_request_runs_once_and_gets_the_first_answer():
    """Trap 7: a train step that timed out and is sent again must not run twice."""
    serial, work = Serial(), Work()
    assert [await serial.run_idempotent("p", "a", work) for _ in range(3)] == [10, 10, 10]
    assert work.runs == 1


async def test_a_request_repeated_while_it_runs_waits_for_the_same_answer():
    serial, work = Serial(), Work(waiting=True)
    tasks = [asyncio.ensure_future(serial.run_idempotent("p", "a", work)) for _ in range(5)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*tasks) == [10] * 5
    assert work.runs == 1


async def test_different_requests_run_one_at_a_time_in_order():
    serial, work = Serial(), Work()
    assert await asyncio.gather(*(serial.run_idempotent("p", str(i), work) for i in range(6))) == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    assert work.most_at_once == 1


async def test_a_failure_may_be_tried_again_and_a_success_then_stands():
    serial, work = Serial(), Work(fail=2)
    for number in (1, 2):
        with pytest.raises(RuntimeError, match=f"run {number}"):
            await serial.run_idempotent("p", "a", work)
    assert [await serial.run_idempotent("p", "a", work) for _ in range(2)] == [30, 30]


async def test_all_who_wait_hear_of_a_failure_and_the_next_request_goes_on():
    serial, work = Serial(), Work(fail=1, waiting=True)
    tasks = [asyncio.ensure_future(serial.run_idempotent("p", "a", work)) for _ in range(3)]
    after = asyncio.ensure_future(serial.run_idempotent("p", "b", work))
    await asyncio.sleep(0)
    work.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(f) for f in found] == ["run 1"] * 3
    assert await after == 20


async def test_a_caller_that_is_cancelled_does_not_stop_the_work():
    serial, work = Serial(), Work(waiting=True)
    task = asyncio.ensure_future(serial.run_idempotent("p", "a", work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work.go.set()
    assert await serial.run_idempotent("p", "a", work) == 10
    assert work.runs == 1


async def test_only_the_newest_answers_are_remembered():
    serial, work = Serial(), Work()
    for number in range(REMEMBERED + 1):
        await serial.run_idempotent("p", str(number), work)
    await serial.run_idempotent("p", "1", work)
    assert work.runs == REMEMBERED + 1
    await serial.run_idempotent("p", "0", work)
    assert work.runs == REMEMBERED + 2


async def test_equal_ids_of_two_policies_are_two_requests_and_a_policy_can_be_forgotten():
    serial, work = Serial(), Work()
    assert await serial.run_idempotent("p", "a", work) == 10
    assert await serial.run_idempotent("q", "a", work) == 20
    serial.forget("p")
    assert await serial.run_idempotent("q", "a", work) == 20
    assert await serial.run_idempotent("p", "a", work) == 30


async def test_work_without_an_id_waits_its_turn_and_goes_on_without_its_caller():
    serial, work = Serial(), Work(waiting=True)
    first = asyncio.ensure_future(serial.run(work))
    second = asyncio.ensure_future(serial.run_idempotent("p", "a", work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.go.set()
    assert await second == 20
    assert (work.runs, work.most_at_once) == (2, 1)


async def test_long_results_are_kept_up_to_a_size_and_an_older_request_is_refused_and_not_repeated():
    def report(floats: int) -> StepReport:
        rows = (np.zeros(floats, np.float32),)
        counts = {"rows": 1, "trained_tokens": 1, "forward_tokens": 1, "flat_tokens": 1}
        return StepReport(**counts, metrics={}, logprobs=rows)

    known = KnownRequests(most_bytes=1000)
    for number in range(5):
        result: asyncio.Future = asyncio.get_running_loop().create_future()
        known.remember(f"p{number % 2}", str(number), result)
        result.set_result(report(100))
        await asyncio.sleep(0)
    for number in range(3):
        with pytest.raises(Expired, match=rf"'{number}'.*executed"):
            known.find(f"p{number % 2}", str(number))
    assert known.find("p1", "3") is not None
    assert known.find("p0", "4") is not None
    large: asyncio.Future = asyncio.get_running_loop().create_future()
    known.remember("p0", "large", large)
    large.set_result(report(10_000))
    await asyncio.sleep(0)
    assert known.find("p0", "large") is large, "the newest is kept in any case"
    with pytest.raises(Expired):
        known.find("p0", "4")
    known.forget("p0")
    assert known.find("p0", "4") is None
