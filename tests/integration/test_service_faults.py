"""Deaths in the service: whoever dies, and wherever, nothing accepted is lost, and the job ends as if it had not been.

Cells of the table in `tests/faults`, whose code this is, and what has no place there: the scheduler's own points, at
which nothing of the job may have begun; two that die together; a server that dies at every start. The control store is
SQLite here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from faults.cells import KILL, MODEL_SERVER, SCHEDULER, STOP, cell
from faults.invariants import (
    assert_as_if_nothing_had_happened,
    assert_cancelled,
    assert_everything_can_be_had,
    assert_nothing_is_held,
)
from faults.provoking import LOST_ONCE, NOT_LOST, SLOW, play, started, wait_until_given_up
from faults.world import CPUS, GPUS, World
from nodes import cluster
from service import GAMES, LONG, Service, until

from palestra_control.job import Job
from palestra_service.ray.servers import PING_LIMIT_SECONDS

pytestmark = pytest.mark.service
# Of the job's commits: 1 submitted, 2 STARTING, 3 RUNNING, 4 the end, or the wish to cancel it.
SCHEDULERS_OWN = {
    "scheduler-SIGKILL-after-submit": "after_job_commit:1",
    "scheduler-SIGKILL-before-a-server-is-started": "after_job_commit:2",
    "scheduler-SIGKILL-when-a-server-was-started": "before_job_commit:3",
    "scheduler-SIGKILL-at-the-end": "before_job_commit:4",
}
OF_MODEL_SERVERS = tuple(
    cell(MODEL_SERVER, KILL, moment) for moment in ("mid-step", "mid-checkpoint", "mid-publish", "at cancel")
)
HANGING = cell(MODEL_SERVER, STOP, "mid-generation")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.add(cpus=CPUS, gpus=GPUS)
        with Service(tmp_path_factory.mktemp("service"), ("--ray-address", nodes.address)) as service:
            yield World(nodes, service.start())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[] if name.endswith("after-submit") else pytest.mark.long)
        for name, fault in SCHEDULERS_OWN.items()
    ],
)
def test_a_killed_scheduler_is_not_seen_in_what_a_job_leaves(world, fault):
    service, undisturbed = world.service, world.undisturbed
    service.processes[-1].kill()
    service.start(fault)
    control = service.client()
    with ThreadPoolExecutor(1) as pool:
        submitting = pool.submit(control.submit, GAMES, name=fault, gpus=1)
        assert service.processes[-1].wait(60) == -signal.SIGKILL, service.processes[-1].output
        service.start()
        job = submitting.result()
    job.wait()
    assert [view.job_id for view in control.jobs(name=fault)] == [job.job_id]  # sent twice, and there once
    assert job.view().starts == (2 if fault == "after_job_commit:2" else 1)
    assert_as_if_nothing_had_happened(world, job, NOT_LOST, undisturbed)


def test_scheduler_and_model_server_die_together__SIGKILL_mid_step(world):
    service, undisturbed = world.service, world.undisturbed
    job = service.client().submit(SLOW, gpus=1)
    until(lambda: (world.checkpoints(job) / "step-000001").exists(), "it trains")
    (process,) = service.processes_of(job.job_id)
    service.processes[-1].kill()
    process.kill()
    process.wait()
    service.start()
    job.wait()
    assert_as_if_nothing_had_happened(world, job, LOST_ONCE, undisturbed)


def test_a_job_is_cancelled_though_the_scheduler_dies_of_it__scheduler_SIGKILL_at_cancel(world):
    service = world.service
    service.processes[-1].kill()
    service.start("after_job_commit:4")
    job = service.client().submit(LONG, gpus=1)
    until(lambda: (world.checkpoints(job) / "step-000001").exists(), "it trains")
    with ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(job.cancel)
        assert service.processes[-1].wait(60) == -signal.SIGKILL, service.processes[-1].output
        service.start()
        cancelling.result()
    job.wait()
    assert_cancelled(world, job)


@pytest.mark.long
def test_a_scheduler_that_is_stopped_for_a_while_takes_note_of_what_happened__SIGSTOP_mid_step(world):
    play(world, cell(SCHEDULER, STOP, "mid-step"))


@pytest.fixture(scope="module")
def hanging(world) -> Iterator[tuple[Job, psutil.Process]]:
    """A job whose server stands still; early, for it is given up after half a minute. Its scheduler has to live on."""
    job = started(world, HANGING)
    server = world.held(job)
    world.busy.add(world.machine(HANGING.moment.fault(MODEL_SERVER)).cpus)
    with world.others_continue(job, server):
        yield job, server


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=[] if cell.name.endswith("mid-checkpoint") else pytest.mark.long)
        for cell in OF_MODEL_SERVERS
    ],
)
def test_a_killed_model_server_goes_on_from_its_checkpoint(world, cell):
    play(world, cell)


@pytest.mark.usefixtures("hanging")
def test_a_model_server_that_dies_at_every_start_fails_with_the_reason__SIGKILL_at_start(world):
    cpus = 1000
    node = world.add_node(cpus, "before_publish:1")
    job = world.service.client().submit(GAMES, cpus=cpus, restarts=1)
    view = job.wait()
    assert (view.state, view.starts) == ("failed", 2), view
    assert view.reason.startswith("lost 2 times, at last: "), view
    assert_nothing_is_held(world, job)
    node.kill()


def test_a_model_server_that_hangs_is_killed_and_goes_on__SIGSTOP_mid_generation(world, hanging):
    job, server = hanging
    wait_until_given_up(world, job, server, PING_LIMIT_SECONDS)
    world.busy.clear()
    assert_as_if_nothing_had_happened(world, job, LOST_ONCE, world.undisturbed)


def test_after_all_of_it_a_job_that_needs_everything_starts(world):
    assert_everything_can_be_had(world)
