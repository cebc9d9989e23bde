"""Deaths in the service: whoever dies, and wherever, nothing accepted is lost, and the job ends as if it had not been.

A scheduler dies at its own points (`palestra/faults.py`); it joins a cluster, so its model servers do not inherit them.
Model servers get theirs from the machine that they run on: a node with a fault in its environment arms every server
that starts there. All but one of these points come so late that a server that goes on from a checkpoint does not
meet them a second time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from nodes import Nodes, cluster
from outcome import assert_same_metrics
from servers import Job as Folder
from service import GAMES, LONG, Service, until
from test_own_runners import assert_each_episode_is_trained_once

from palestra.client.control import Job

pytestmark = pytest.mark.service
CPUS, GPUS = 6, 2
SLOW = GAMES | {"engine": {"kind": "scripted", "scripted_tokens": 3, "scripted_delay_seconds": 0.05}}
# Of the job's commits: 1 submitted, 2 STARTING, 3 RUNNING, 4 the end, or the wish to cancel it.
SCHEDULER = {
    "scheduler-SIGKILL-after-submit": "after_job_commit:1",
    "scheduler-SIGKILL-before-a-server-is-started": "after_job_commit:2",
    "scheduler-SIGKILL-when-a-server-was-started": "before_job_commit:3",
    "scheduler-SIGKILL-at-the-end": "before_job_commit:4",
}
MODEL_SERVER = {
    "model-server-SIGKILL-mid-step": "after_step:2",
    "model-server-SIGKILL-at-checkpoint": "before_checkpoint_rename:3",
    "model-server-SIGKILL-at-publish": "before_publish:4",
}


@dataclass
class World:
    """A cluster, its service, and what a job leaves that nothing disturbed."""

    nodes: Nodes
    service: Service
    hanging_gpus: float = 0.0

    def __post_init__(self) -> None:
        self.undisturbed = self.folder(self.job_over(GAMES))

    def folder(self, job: Job) -> Folder:
        return Folder(self.service.state / "jobs" / job.job_id, GAMES, tasks=(), validation=())

    def job_over(self, config: dict, **more: object) -> Job:
        job = self.service.client().submit(config, **more)
        assert job.wait().state == "completed", job.view()
        return job

    def armed(self, fault: str | None) -> None:
        """Another scheduler, which will die at the fault; to the cluster it is as if the one before had died."""
        self.service.processes[-1].kill()
        self.service.start(fault)

    def armed_node(self, fault: str) -> int:
        """Another machine, whose model servers will die at the fault; returns its CPUs: no other one has so many."""
        cpus = 10 * (len(self.nodes.nodes) + 1)
        self.nodes.add(cpus=cpus, settings={"PALESTRA_FAULT": fault})
        control = self.service.client()
        control.request("POST", "/cluster/drain", json={"on": False})  # look at the machines now
        until(lambda: any(n["cpus"] == cpus for n in control.request("GET", "/cluster")["nodes"]), "it is seen")
        return cpus

    def steps(self, job: Job) -> Path:
        return self.service.state / "jobs" / job.job_id / "run" / "checkpoints"

    def assert_as_if_nothing_had_happened(self, job: Job, starts: int) -> None:
        view = job.view()
        assert (view.state, view.starts) == ("completed", starts), (view, job.changes())
        left = self.folder(job)
        assert_each_episode_is_trained_once(left)
        assert_same_metrics(left, self.undisturbed)
        assert left.weights() == self.undisturbed.weights()
        self.assert_nothing_is_held(job)

    def assert_nothing_is_held(self, job: Job) -> None:
        control = self.service.client()
        until(lambda: not self.service.processes_of(job.job_id), "its process is gone")
        (node,) = (node for node in control.request("GET", "/cluster")["nodes"] if node["gpus"])
        assert node["free_gpus"] in (GPUS, GPUS - self.hanging_gpus)  # the one that hangs may be given up by now


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.add(cpus=CPUS, gpus=GPUS)
        with Service(tmp_path_factory.mktemp("service"), ("--ray-address", nodes.address)) as service:
            yield World(nodes, service.start())


@pytest.mark.parametrize("fault", SCHEDULER.values(), ids=SCHEDULER.keys())
def test_a_killed_scheduler_is_not_seen_in_what_a_job_leaves(world, fault):
    service = world.service
    world.armed(fault)
    control = service.client()
    with ThreadPoolExecutor(1) as pool:
        submitting = pool.submit(control.submit, GAMES, name=fault, gpus=1)
        assert service.processes[-1].wait(60) == -signal.SIGKILL, service.processes[-1].output
        service.start()
        job = submitting.result()
    job.wait()
    assert [view.job_id for view in control.jobs(name=fault)] == [job.job_id]  # sent twice, and there once
    world.assert_as_if_nothing_had_happened(job, starts=2 if fault == "after_job_commit:2" else 1)


def test_a_job_is_cancelled_though_the_scheduler_dies_of_it__scheduler_SIGKILL_at_cancel(world):
    service = world.service
    world.armed("after_job_commit:4")
    job = service.client().submit(LONG, gpus=1)
    job.wait_for_server()
    with ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(job.cancel)
        assert service.processes[-1].wait(60) == -signal.SIGKILL, service.processes[-1].output
        service.start()
        cancelling.result()
    assert job.wait().state == "cancelled"
    assert any(world.steps(job).glob("step-*"))
    world.assert_nothing_is_held(job)


def test_a_scheduler_that_is_stopped_for_a_while_takes_note_of_what_happened__scheduler_SIGSTOP_mid_step(world):
    job = world.service.client().submit(SLOW, gpus=1)
    until(lambda: (world.steps(job) / "step-000001").exists(), "it trains")
    scheduler = world.service.processes[-1]
    scheduler.send(signal.SIGSTOP)
    try:
        until(lambda: (world.steps(job) / "step-000003").exists(), "it trains on")
    finally:
        scheduler.send(signal.SIGCONT)
    job.wait()
    world.assert_as_if_nothing_had_happened(job, starts=1)


def test_scheduler_and_model_server_die_together__SIGKILL_mid_step(world):
    service = world.service
    job = service.client().submit(SLOW, gpus=1)
    until(lambda: (world.steps(job) / "step-000001").exists(), "it trains")
    (process,) = service.processes_of(job.job_id)
    service.processes[-1].kill()
    process.kill()
    process.wait()
    service.start()
    job.wait()
    world.assert_as_if_nothing_had_happened(job, starts=2)


@pytest.fixture(scope="module")
def hanging(world) -> Iterator[tuple[Job, psutil.Process]]:
    """A job whose server is stopped, early, for noticing it takes half a minute. Its scheduler has to live so long."""
    world.hanging_gpus = 0.5  # on the first node, for no other has any
    job = world.service.client().submit(SLOW, gpus=world.hanging_gpus)
    until(lambda: (world.steps(job) / "step-000001").exists(), "it trains")
    (process,) = world.service.processes_of(job.job_id)
    process.suspend()
    yield job, process
    if process.is_running():
        process.kill()


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("fault", MODEL_SERVER.values(), ids=MODEL_SERVER.keys())
def test_a_killed_model_server_goes_on_from_its_checkpoint(world, fault):
    cpus = world.armed_node(fault)
    job = world.service.client().submit(GAMES, cpus=cpus)
    job.wait()
    world.assert_as_if_nothing_had_happened(job, starts=2)
    world.nodes.nodes[-1].kill()


def test_a_model_server_that_dies_at_every_start_fails_with_the_reason__SIGKILL_at_start(world):
    cpus = world.armed_node("before_publish:1")
    job = world.service.client().submit(GAMES, cpus=cpus, restarts=1)
    view = job.wait()
    assert (view.state, view.starts) == ("failed", 2), view
    assert view.reason.startswith("lost 2 times, at last: "), view
    world.assert_nothing_is_held(job)
    world.nodes.nodes[-1].kill()


def test_a_model_server_that_dies_while_it_is_cancelled__SIGKILL_at_cancel(world):
    job = world.service.client().submit(LONG, gpus=1)
    until(lambda: (world.steps(job) / "step-000001").exists(), "it trains")
    (process,) = world.service.processes_of(job.job_id)
    process.suspend()  # so that it does not end by itself first
    job.cancel()
    process.kill()
    assert job.wait().state == "cancelled"
    world.assert_nothing_is_held(job)


def test_a_model_server_that_hangs_is_killed_and_goes_on__SIGSTOP_mid_step(world, hanging):
    job, process = hanging
    until(lambda: job.view().state != "running", "it is given up", 40)
    until(lambda: not process.is_running(), "it is killed", 20)
    job.wait()
    world.hanging_gpus = 0.0
    world.assert_as_if_nothing_had_happened(job, starts=2)
    assert "did not answer for 30 s" in [change.reason for change in job.changes()][3]


def test_after_all_of_it_a_job_that_needs_everything_starts(world):
    """So nothing is held in Ray's own books either."""
    world.job_over(GAMES | {"steps": 1}, cpus=CPUS, gpus=GPUS)
