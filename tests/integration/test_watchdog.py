"""A job in which nothing happens any more ends in FAILED, and says which part holds up the others."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from in_process import serving
from unit.building import FakeClock

from palestra.errors import EngineFailure, JobStuck
from palestra.learner import groups
from palestra.runtime import local
from palestra.runtime import local_job as running_job
from palestra.types.progress import Part
from palestra.types.records import Task
from palestra.types.states import STUCK, JobState

GAMES = {
    "steps": 3,
    "engine": {"kind": "fake", "reply_tokens": 3},
    "environment": {"name": "frozen-lake", "settings": {"impossible_reward": -1.0}, "train_tasks": 9},
    "rollout": {"group_size": 8, "groups_per_step": 2},
    "evaluation": {"every_steps": 0},
    "watchdog": {"stuck_seconds": 2.0},
}


async def hang(*_, **__):
    await asyncio.Event().wait()


def after(calls, method):
    """A method that hangs after so many calls."""

    async def limited(*given, **named):
        nonlocal calls
        if calls == 0:
            await hang()
        calls -= 1
        return await method(*given, **named)

    return limited


@contextlib.asynccontextmanager
async def watched(folder, monkeypatch, break_it=lambda parts: None, **settings):
    """A running job with a part that `break_it` has broken, and the clock of its watchdog."""
    build = local.build_parts

    def broken(*given):
        parts = build(*given)
        break_it(parts)
        return parts

    monkeypatch.setattr(local, "build_parts", broken)
    async with serving(folder, **GAMES | settings) as job:
        clock = FakeClock()
        job._watchdog._clock = clock
        running = asyncio.ensure_future(job.run())
        yield job, running, clock
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, JobStuck, EngineFailure):
            await running


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def reason(job, running, clock):
    """Let the watchdog's time pass, and return why the job has failed."""
    await asyncio.sleep(0.25)  # the watchdog has seen what was done last
    clock.advance(3)
    with pytest.raises(JobStuck) as raised:
        await asyncio.wait_for(running, 20)
    assert job.progress.state is JobState.FAILED
    assert job.progress.reason == str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("syncs", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["the first", "the third"])
async def test_a_weight_sync_that_never_ends(tmp_path, monkeypatch, syncs):
    def break_it(parts):
        parts.engine.sync_weights = after(syncs, parts.engine.sync_weights)

    async with watched(tmp_path, monkeypatch, break_it) as (job, running, clock):
        await until(lambda: job.progress.part is Part.WEIGHT_SYNC and job.progress.step == max(syncs - 1, 0))
        assert "stuck: weight sync: the engine has not taken" in await reason(job, running, clock)


@pytest.mark.slow
async def test_an_engine_that_dies_in_an_update_ends_the_job_at_once(tmp_path, monkeypatch):
    def break_it(parts):
        died = asyncio.Event()

        async def failure():
            await died.wait()
            return "the engine failed: out of memory"

        async def dies(*_):
            died.set()
            await hang()

        parts.engine.failure, parts.engine.sync_weights = failure, dies

    async with watched(tmp_path, monkeypatch, break_it) as (job, running, _):
        with pytest.raises(EngineFailure, match="of memory"):
            await asyncio.wait_for(running, 20)
        assert job.progress.state is JobState.FAILED


async def test_a_learner_that_waits_for_episodes_of_which_none_is_open(tmp_path, monkeypatch):
    async def registers_nothing(*_):
        await asyncio.sleep(0.01)
        return False

    monkeypatch.setattr(groups, "_register", registers_nothing)
    async with watched(tmp_path, monkeypatch) as (job, running, clock):
        await until(lambda: job.progress.collecting is not None)
        found = await reason(job, running, clock)
        assert "stuck: learner: gathering step 1 waits for episodes, and none is open" in found


@pytest.mark.slow
async def test_a_trainer_that_does_not_come_back(tmp_path, monkeypatch):
    def break_it(parts):
        parts.trainer.forward_backward = hang

    async with watched(tmp_path, monkeypatch, break_it) as (job, running, clock):
        await until(lambda: job.progress.part is Part.TRAINER)
        assert "stuck: trainer: training step 1 does not end" in await reason(job, running, clock)


@pytest.mark.slow
async def test_a_part_that_can_not_be_cancelled_does_not_hold_up_the_end(tmp_path, monkeypatch):
    for module in (local, running_job):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    released = asyncio.Event()

    async def will_not(*_, **__):
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    def break_it(parts):
        parts.trainer.forward_backward = will_not

    async with watched(tmp_path, monkeypatch, break_it) as (job, running, clock):
        await until(lambda: job.progress.part is Part.TRAINER)
        said = []
        report = lambda kind, data: said.append((kind, data["text"], running.done()))  # noqa: E731
        job.opened = replace(job.opened, report=report)
        why = await reason(job, running, clock)
        assert "stuck: trainer" in why
        assert said == [
            (STUCK, f"{why}; the job is ended, which takes up to minutes where a part of it does not answer", False)
        ]
        events = await job.plane.store.log.events(0)
        assert [event.kind for event in events].count("failed") == 1
        released.set()


async def test_an_engine_that_gives_no_token(tmp_path, monkeypatch):
    async with watched(tmp_path, monkeypatch, engine={"kind": "fake", "delay_seconds": 1000}) as (job, running, clock):
        await until(lambda: job.plane.sessions.context.policies.engine_loads[0].waiting == 16)
        assert "stuck: engine: 16 calls have got no token" in await reason(job, running, clock)


async def test_a_collector_that_died_and_still_renews_its_leases(tmp_path, monkeypatch):
    async with watched(tmp_path, monkeypatch, environment={}) as (job, running, clock):
        await job.plane.store.tasks.push("train", [Task(task_id="t", data={})], "chunk")
        await job.plane.store.tasks.seal()
        await until(lambda: job.progress.collecting is not None)
        async with asyncio.timeout(20):
            while await job.plane.store.episodes.claim("rack-7", "c-1", None) is None:
                await asyncio.sleep(0.01)
        found = await reason(job, running, clock)
        assert "stuck: collectors: 1 episodes are being played (held by rack-7), and none calls the model" in found


@pytest.mark.slow
async def test_a_job_waits_for_workers_as_long_as_none_plays(tmp_path, monkeypatch):
    changes = {"environment": {}, "watchdog": {"stuck_seconds": 2.0}}
    async with watched(tmp_path, monkeypatch, **changes) as (job, running, clock):
        await until(lambda: job.progress.state is JobState.RUNNING)
        for _ in range(3):
            clock.advance(3)
            await asyncio.sleep(0.3)
        assert job.progress.state is JobState.RUNNING
        assert not running.done()
