"""Time limits of jobs: what ends them, and what may start in the gaps that they make known (EASY backfill)."""

from __future__ import annotations

import asyncio
import math

import pytest

from palestra.types.states import JobState
from palestra_control.jobs import Resources
from palestra_service.jobs.launcher import Ending
from palestra_service.placement.fitting import Node
from palestra_service.store import decisions
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, is_true, scheduling, submit
from unit.waiting import until

PART, WHOLE = Resources(cpus=2.0), Resources(cpus=4.0)
OVER = "its time limit of 1 h 30 min is over"


@pytest.fixture
def store(sqlite_store):
    return sqlite_store


@pytest.fixture
def launcher():
    return FakeLauncher(Node(node_id="n", cpus=4.0, gpus=0, memory_gib=4.0))


async def runs(store, **values):
    job = await submit(store, **values)
    await until(in_state(store, job.job_id, JobState.RUNNING))
    return job


async def waits(store, scheduler, **values):
    """A job that is looked at, and kept waiting."""
    job = await submit(store, **values)
    await until(lambda: is_true(job.job_id in scheduler.waiting))
    return job


async def a_round_later(store, scheduler) -> None:
    """Everything is looked at once more."""
    clock_reads, real = [], scheduler._round

    async def counted():
        result = await real()
        clock_reads.append(1)
        return result

    scheduler._round = counted
    store.changed.notify()
    await until(lambda: is_true(bool(clock_reads)))
    scheduler._round = real


async def later(store, scheduler, seconds: float) -> None:
    store.clock.advance(seconds)
    await a_round_later(store, scheduler)


async def state(store, job) -> JobState:
    return (await store.job(None, job.job_id)).state


async def test_a_short_job_starts_in_the_gap_before_a_large_one_and_a_long_one_does_not(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        await runs(store, resources=PART, time_limit_seconds=1000.0)
        large = await waits(store, scheduler, resources=WHOLE, priority="high")  # before tenants that hold less
        unlimited = await waits(store, scheduler, resources=PART)
        long = await waits(store, scheduler, resources=PART, time_limit_seconds=2000.0)
        short = await runs(
            store, resources=PART, time_limit_seconds=500.0, tenant="b"
        )  # a tenant's equal jobs keep order
        for job in (large, unlimited, long):
            assert await state(store, job) is JobState.QUEUED
        assert "kept for it" in scheduler.waiting[large.job_id]
        assert launcher.started[-1] == short.job_id


async def test_a_served_model_with_a_limit_ends_so_its_room_is_waited_for(store, tmp_path, launcher):
    served = {"kind": "inference", "config": {"kind": "inference"}, "resources": PART}
    async with scheduling(store, tmp_path, launcher) as scheduler:
        first = await runs(store, time_limit_seconds=1000.0, **served)
        assert scheduler.running[first.job_id].expected_end == (await store.job(None, first.job_id)).changed_at + 1000
        large = await waits(store, scheduler, resources=WHOLE)
        assert "kept for it" in scheduler.waiting[large.job_id]
        await runs(store, time_limit_seconds=500.0, **served)
        endless = await waits(store, scheduler, **served)
        assert await state(store, endless) is JobState.QUEUED


async def test_the_learners_estimate_is_the_expected_end_of_a_job_without_a_limit(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        first = await runs(store, resources=PART)
        assert scheduler.running[first.job_id].expected_end is None
        await waits(store, scheduler, resources=WHOLE)
        short = await waits(store, scheduler, resources=PART, time_limit_seconds=500.0)
        await launcher.answer(first.job_id, None)
        await a_round_later(store, scheduler)
        assert await state(store, short) is JobState.QUEUED
        await launcher.answer(first.job_id, 1000.0)
        store.changed.notify()
        await until(in_state(store, short.job_id, JobState.RUNNING))


async def test_an_estimate_counts_where_it_is_earlier_than_the_limit_and_is_a_number(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await runs(store, time_limit_seconds=1000.0)
        now = store.clock.now()

        async def expected_after(seconds_left) -> float:
            await launcher.answer(job.job_id, seconds_left)
            return scheduler.running[job.job_id].expected_end - now

        assert await expected_after(2000.0) == 1000.0
        assert await expected_after(300.0) == 300.0
        assert await expected_after(400.0) == 400.0  # the newest counts
        for wrong in (math.nan, math.inf, -math.inf, -1.0, None):
            assert await expected_after(wrong) == 400.0


async def test_a_job_that_always_says_it_is_nearly_done_starves_nobody(store, tmp_path, launcher):
    """Short jobs of others flow past only until the large one is overdue."""
    async with scheduling(store, tmp_path, launcher) as scheduler:
        liar = await runs(store, resources=PART)
        large = await waits(store, scheduler, resources=WHOLE, tenant="b")
        await launcher.answer(liar.job_id, 600.0)
        early = await runs(store, resources=PART, tenant="c", time_limit_seconds=60.0)
        launcher.end(early.job_id, Ending.COMPLETED)
        await until(in_state(store, early.job_id, JobState.COMPLETED))
        store.clock.advance(3 * scheduler.policy.aging_seconds)
        await launcher.answer(liar.job_id, 600.0)
        late = await submit(store, resources=PART, tenant="c", time_limit_seconds=60.0)
        await until(lambda: is_true(late.job_id in scheduler.waiting))
        await a_round_later(store, scheduler)
        assert await state(store, late) is JobState.QUEUED
        launcher.end(liar.job_id, Ending.COMPLETED)
        await until(in_state(store, large.job_id, JobState.RUNNING))


async def test_a_job_whose_limit_is_over_saves_and_is_cancelled_with_the_reason(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher, stop_seconds=7.0) as scheduler:
        job, other = await runs(store, time_limit_seconds=5400.0), await runs(store)
        server = launcher.servers[job.job_id]
        await later(store, scheduler, 5398)
        assert await state(store, job) is JobState.RUNNING
        await later(store, scheduler, 2)
        await until(in_state(store, job.job_id, JobState.CANCELLED))
        assert server.stopped_with == 7.0
        assert await state(store, other) is JobState.RUNNING
    over = await store.job("a", job.job_id)
    assert over.reason == (
        f"{OVER}; to train further from its newest checkpoint, submit with --from-job {job.job_id} --kind training"
    )


async def test_the_limit_of_a_served_model_says_how_to_serve_it_again(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await runs(store, kind="inference", config={"kind": "inference"}, time_limit_seconds=5400.0)
        await later(store, scheduler, 5400)
        await until(in_state(store, job.job_id, JobState.CANCELLED))
    assert (await store.job("a", job.job_id)).reason == f"{OVER}; to serve the model again, submit the job again"


async def test_time_counts_only_while_a_job_runs_and_over_all_of_its_starts(store, tmp_path, launcher):
    launcher.quick = False
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store, time_limit_seconds=5400.0)
        await until(lambda: is_true(job.job_id in launcher.servers))
        await later(store, scheduler, 10_000)  # STARTING
        launcher.servers[job.job_id].listening.set()
        await until(in_state(store, job.job_id, JobState.RUNNING))
        await later(store, scheduler, 3000)
        await store.write(lambda c: decisions.set_draining(c, True))
        launcher.end(job.job_id, Ending.LOST, "its machine is gone")
        await until(in_state(store, job.job_id, JobState.QUEUED))
        await later(store, scheduler, 10_000)  # QUEUED
        launcher.quick = True
        await store.write(lambda c: decisions.set_draining(c, False))
        store.changed.notify()
        await until(in_state(store, job.job_id, JobState.RUNNING))
        assert scheduler.running[job.job_id].expected_end == store.clock.now() + 2400
        await later(store, scheduler, 2399)
        assert await state(store, job) is JobState.RUNNING
        await later(store, scheduler, 1)
        await until(in_state(store, job.job_id, JobState.CANCELLED))


async def test_a_limit_goes_on_under_another_scheduler_and_while_there_is_none(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await runs(store, time_limit_seconds=5400.0)
        await later(store, scheduler, 3000)
    store.clock.advance(2000)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        await scheduler.ready.wait()
        await a_round_later(store, scheduler)
        assert await state(store, job) is JobState.RUNNING
        assert scheduler.running[job.job_id].expected_end == store.clock.now() + 400
        await later(store, scheduler, 400)
        await until(in_state(store, job.job_id, JobState.CANCELLED))
    assert (await store.job("a", job.job_id)).reason.startswith(OVER)


async def test_a_limit_that_passed_while_there_was_no_scheduler_ends_the_job_when_there_is_one(
    store, tmp_path, launcher
):
    async with scheduling(store, tmp_path, launcher):
        job = await runs(store, time_limit_seconds=5400.0)
    store.clock.advance(6000)
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.CANCELLED))


async def test_a_scheduler_that_dies_while_a_job_saves_at_its_limit_leaves_it_to_the_next(
    store, tmp_path, launcher, monkeypatch
):
    saves = asyncio.Event()
    real = launcher.stop

    async def slow(job_id, grace_seconds):
        saves.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(launcher, "stop", slow)
    async with scheduling(store, tmp_path, launcher):
        job = await runs(store, time_limit_seconds=5400.0)
        store.clock.advance(5400)
        store.changed.notify()
        await saves.wait()
    monkeypatch.setattr(launcher, "stop", real)
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.CANCELLED))
    assert (await store.job("a", job.job_id)).reason.startswith(OVER)


@pytest.mark.slow
async def test_a_server_that_is_lost_when_the_limit_is_over_is_not_started_again(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher):
        job = await runs(store, time_limit_seconds=5400.0)
        store.clock.advance(5400)
        launcher.end(job.job_id, Ending.LOST, "its machine is gone")
        await until(in_state(store, job.job_id, JobState.CANCELLED))
    assert (await store.job("a", job.job_id)).reason.startswith(f"{OVER}")
    assert launcher.started == [job.job_id]


async def test_a_wall_clock_that_is_set_while_a_job_runs_does_not_end_it(store, tmp_path, launcher):
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await runs(store, time_limit_seconds=5400.0)
        await until(lambda: is_true(not scheduler.running[job.job_id].starting))  # its time is counted from here
        store.clock.wall += 100_000
        await a_round_later(store, scheduler)
        assert await state(store, job) is JobState.RUNNING
