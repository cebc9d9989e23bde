"""What a scheduler makes of the end of another, and of a cluster or a database that is away for a while."""

from __future__ import annotations

import asyncio

import pytest

from palestra.errors import ServerFailed, StoreUnreachable
from palestra.types.states import JobState
from palestra_control.jobs import Resources
from palestra_service.jobs import scheduler as scheduler_module
from palestra_service.jobs.launcher import Ended, Ending, write_ended
from unit.control.launching import FakeLauncher, Server
from unit.control.scheduling import in_state, is_true, scheduling, states_of, submit
from unit.waiting import until


@pytest.fixture
def store(sqlite_store):
    return sqlite_store


def unwritable(store, monkeypatch, state: JobState, times: int) -> None:
    """A database that is away as often when a job is to change to this state."""
    change, failures = store.change_state, [state] * times

    async def broken(job_id, before, following, *arguments, **fields):
        if following is state and failures:
            failures.pop()
            raise StoreUnreachable("away")
        return await change(job_id, before, following, *arguments, **fields)

    monkeypatch.setattr(store, "change_state", broken)


async def test_a_new_scheduler_finds_what_runs_and_puts_back_what_is_gone(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher):
        kept = await submit(store, resources=Resources(cpus=1.0, gpus=0.5))
        gone = await submit(store)
        for job in (kept, gone):
            await until(in_state(store, job.job_id, JobState.RUNNING))
    assert (await store.job("a", kept.job_id)).state is JobState.RUNNING  # its end does not end them
    del launcher.servers[gone.job_id]
    async with scheduling(store, tmp_path, launcher) as scheduler:
        await until(lambda: is_true(launcher.started.count(gone.job_id) == 2))
        assert launcher.started.count(kept.job_id) == 1
        assert scheduler.running[kept.job_id].devices[0].share == 5000
        launcher.end(kept.job_id, Ending.COMPLETED)
        await until(in_state(store, kept.job_id, JobState.COMPLETED))
        await until(in_state(store, gone.job_id, JobState.RUNNING))
    assert await states_of(store, gone.job_id) == ["queued", "starting", "running", "queued", "starting", "running"]


async def test_what_was_starting_when_the_scheduler_died_is_found_or_started_again(store, tmp_path):
    launcher = FakeLauncher(quick=False)
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.STARTING))
    assert (await store.job("a", job.job_id)).state is JobState.STARTING
    launcher.quick = True
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.RUNNING))
    assert (await store.job("a", job.job_id)).starts == 2


async def test_a_job_that_was_to_be_cancelled_when_the_scheduler_died_is_cancelled(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
    await store.request_cancel("a", job.job_id, "enough")
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.CANCELLED))


async def test_a_start_that_the_end_of_a_scheduler_broke_off_is_not_the_fault_of_the_job(store, tmp_path):
    launcher = FakeLauncher(quick=False)
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, restarts_limit=0)
        await until(lambda: is_true(job.job_id in launcher.servers))
    assert launcher.servers == {}
    launcher.quick = True
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.RUNNING))


async def test_what_is_left_of_jobs_that_are_over_is_ended_and_what_others_run_is_not(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        order = launcher.servers[job.job_id].order
        launcher.end(job.job_id, Ending.COMPLETED)
        await until(in_state(store, job.job_id, JobState.COMPLETED))
    for name in (job.job_id, "job-of-another-scheduler"):
        launcher.servers[name] = Server(order)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        await scheduler.ready.wait()
        assert launcher.servers[job.job_id].stopped_with == 0.0
        assert launcher.servers["job-of-another-scheduler"].stopped_with is None


async def test_a_server_that_ended_while_nobody_listened_has_left_how(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store, restarts_limit=0)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        folder = scheduler.folder_of(job.job_id)
    folder.mkdir(parents=True)
    write_ended(folder, Ended(ending=Ending.COMPLETED))
    del launcher.servers[job.job_id]
    async with scheduling(store, tmp_path, launcher):
        await until(in_state(store, job.job_id, JobState.COMPLETED))


async def test_a_cluster_that_does_not_answer_for_a_moment_holds_nothing_up(store, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.01)
    launcher = FakeLauncher()

    async def no_answer():
        raise ServerFailed("the cluster does not answer")

    nodes, launcher.nodes = launcher.nodes, no_answer
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await asyncio.sleep(0.05)
        launcher.nodes = nodes
        await until(in_state(store, job.job_id, JobState.RUNNING))


async def test_an_error_that_nobody_foresaw_in_a_start_is_told_and_counted(store, tmp_path):
    launcher = FakeLauncher()
    launcher.error = ValueError("what is this?")
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, restarts_limit=1)
        await until(in_state(store, job.job_id, JobState.FAILED))
    assert (await store.job("a", job.job_id)).reason == "lost 2 times, at last: ValueError: what is this?"


async def test_the_end_of_a_job_is_written_down_when_the_database_is_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.01)
    launcher = FakeLauncher()
    unwritable(store, monkeypatch, JobState.COMPLETED, times=3)
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        launcher.end(job.job_id, Ending.COMPLETED)
        await until(in_state(store, job.job_id, JobState.COMPLETED))


async def test_a_job_whose_watch_failed_is_adopted_and_holds_what_it_has(store, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.01)
    launcher = FakeLauncher()
    unwritable(store, monkeypatch, JobState.RUNNING, times=1)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        assert (launcher.started, list(scheduler.running)) == ([job.job_id], [job.job_id])
