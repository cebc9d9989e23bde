"""Faults that have no place in the table: a sleep of everything that watches, damaged checkpoints, a full disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from disks import full, small_disk
from outcome import assert_same_metrics
from servers import Job as Folder
from service import GAMES, LONG, lives, until
from test_own_runners import assert_each_episode_is_trained_once

from faults.invariants import assert_as_if_nothing_had_happened, assert_cancelled, assert_nothing_is_held
from faults.provoking import LOST_ONCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
IN_USE_SECONDS = 5.0  # between two looks at whether a run is free
ASLEEP_SECONDS = 40.0  # longer than a server may be silent
AT_STEP_3 = "before_publish:4:STOP"  # the first publication is of what a job starts with


def test_a_scheduler_that_slept_for_long_does_not_take_its_servers_for_silent(world):
    job = world.service.client().submit(LONG, gpus=1)
    until(lambda: (world.checkpoints(job) / "step-000001").exists(), "it trains")
    scheduler = world.service.processes[-1]
    scheduler.send(signal.SIGSTOP)
    time.sleep(ASLEEP_SECONDS)
    scheduler.send(signal.SIGCONT)
    time.sleep(10)  # two looks at the server
    view = job.view()
    assert (view.state, view.starts) == ("running", 1), job.changes()
    job.cancel()
    job.wait()
    assert_cancelled(world, job)


def test_a_server_that_outlives_its_raylet_is_not_joined_by_another(world):
    """Ray takes the machine for lost while the job's process goes on; two must not write one run."""
    cpus = 1000
    node = world.add_node(cpus)
    job = world.service.client().submit(LONG, cpus=cpus)
    until(lambda: (world.checkpoints(job) / "step-000001").exists(), "it trains")
    (server,) = world.service.processes_of(job.job_id)
    (raylet,) = (process for process in node.processes() if process.name() == "raylet")
    raylet.suspend()
    until(lambda: not world.alive(cpus), "Ray gives up the machine")
    other = world.add_node(cpus)
    until(lambda: job.view().state == "starting", "it is started on another one")
    time.sleep(3 * IN_USE_SECONDS)
    assert (job.view().state, lives(server)) == ("starting", True), job.changes()
    raylet.resume()  # it hears that it was given up, and ends with all that it had started
    until(lambda: job.view().state == "running", "it goes on")
    assert not lives(server)
    job.cancel()
    job.wait()
    assert_cancelled(world, job)
    for lost in (node, other):
        lost.kill()
    until(lambda: not world.alive(cpus), "both are known to be gone")


@pytest.mark.parametrize("damaged", [1, 2], ids=["the newest", "all"])
def test_a_server_that_finds_damaged_checkpoints_uses_the_one_before_or_says_so(world, damaged):
    world.keep_only(AT_STEP_3)
    machine = world.machine(AT_STEP_3)
    job = world.service.client().submit(GAMES, cpus=machine.cpus)
    server = world.held(job)
    there = sorted(world.checkpoints(job).glob("step-*"))
    assert [path.name for path in there] == ["step-000001", "step-000002"]
    for path in there[-damaged:]:
        (path / "weights.txt").write_text("x" * 64)
    server.kill()
    with world.others_continue(job, server):
        view = job.wait()
    assert "step-000002 is damaged" in "".join(job.logs())
    if damaged == 1:
        assert_as_if_nothing_had_happened(world, job, LOST_ONCE, world.undisturbed)
    else:
        assert view.state == "failed"
        assert "every checkpoint" in view.reason
        assert_nothing_is_held(world, job)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Iterator[Folder]:
    with Folder(tmp_path_factory.mktemp("undisturbed"), GAMES, tasks=(), validation=()) as job:
        job.start()
        job.finish()
        yield job


@pytest.mark.parametrize(
    ("mounted", "fault"),
    [
        pytest.param("run", "before_end_commit:30", id="the run, at an end"),
        pytest.param("run", "after_manifest_commit:2", id="the run, at a manifest"),
        pytest.param("run", "after_step:2", id="the run, at a step"),
        pytest.param("run/checkpoints", "after_step:2", id="the checkpoints"),
    ],
)
def test_a_job_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(tmp_path, undisturbed, mounted, fault):
    with small_disk(tmp_path / mounted, "4m") as folder, Folder(tmp_path, GAMES, tasks=(), validation=()) as job:
        server = job.start(fault=f"{fault}:STOP")
        process = psutil.Process(server.popen.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, "it stops at its point")
        with full(folder):
            process.resume()
            assert server.wait() == 2
        said = server.output.splitlines()[-1]
        assert said.startswith("palestra: ")
        assert "disk is full" in said or "No space left on device" in said
        job.start("--resume")
        job.finish()
        assert_each_episode_is_trained_once(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


def test_a_job_of_the_service_whose_checkpoints_find_no_room_is_tried_again_and_fails_with_the_reason(world):
    at_start = "during_start:1:STOP"
    world.keep_only(at_start)
    job = world.service.client().submit(GAMES, cpus=world.machine(at_start).cpus)
    server = world.held(job)
    with small_disk(world.checkpoints(job), "4k"), world.others_continue(job, server):
        server.resume()
        view = job.wait()
        assert (view.state, view.starts) == ("failed", 4), (view, job.changes())
        assert "lost 4 times" in view.reason
        assert "checkpoint of step 1 could not be written" in view.reason
        assert "No space left on device" in view.reason
        assert_nothing_is_held(world, job)
