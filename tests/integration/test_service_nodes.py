"""Two machines: jobs run on both, one machine is lost, and what ran on it goes on at the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from nodes import Nodes, closed, cluster
from service import GAMES, Service, metrics_of, until
from unit.models import scripted_nvml

pytestmark = pytest.mark.service
SLOW = GAMES | {"engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05}, "steps": 12}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        folder = tmp_path_factory.mktemp("library")
        shutil.copy(scripted_nvml.__file__, folder / "pynvml.py")
        scripted = {"PYTHONPATH": str(folder), "PALESTRA_TEST_CARDS": "1"}
        for _ in range(2):
            nodes.add(cpus=3, gpus=1, settings=scripted)
        yield nodes


@pytest.fixture(scope="module")
def service(nodes, tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), ("--ray-address", nodes.address)) as service:
        yield service.start()


def weights_of(service: Service, job_id: str) -> str:
    checkpoints: Path = service.state / "jobs" / job_id / "run" / "checkpoints"
    return (max(checkpoints.glob("step-*")) / "weights.txt").read_text()


def test_each_machine_says_what_its_graphics_cards_do(service):
    control = service.client()
    until(lambda: all(node["gpu_use"] for node in control.request("GET", "/cluster")["nodes"]), "they were asked", 60)
    for node in control.request("GET", "/cluster")["nodes"]:
        (card,) = node["gpu_use"]
        assert (card["name"], card["utilisation"], card["memory_bytes"]) == ("Scripted 0", 0.25, 80 * 2**30)
        assert (node["gpu_problem"], node["free_cpus"], node["free_gpus"]) == ("", 3.0, 1.0)


def test_the_jobs_of_a_machine_that_is_lost_go_on_at_another_and_end_as_if_nothing_had_happened(nodes, service):
    control = service.client()
    machines = control.request("GET", "/cluster")["nodes"]
    assert [(node["cpus"], node["gpus"], node["alive"]) for node in machines] == [(3.0, 1, True)] * 2
    jobs = {}  # by the address of the machine; one has no room for both
    for job in [control.submit(SLOW, cpus=2, gpus=1) for _ in range(2)]:
        jobs[urlsplit(job.wait_for_server().url).hostname] = job
    assert jobs.keys() == {node.address for node in nodes.nodes}
    lost_node = nodes.nodes[1]
    lost, undisturbed = jobs[lost_node.address], jobs[nodes.nodes[0].address]
    port = urlsplit(lost.server().url).port
    (process,) = service.processes_of(lost.job_id)
    assert process in lost_node.processes()
    checkpoints = service.state / "jobs" / lost.job_id / "run" / "checkpoints"
    until(lambda: (checkpoints / "step-000002").exists(), "it has trained")

    lost_node.kill()
    view = lost.wait()
    assert (view.state, view.restarts_left) == ("completed", 2), view  # lost once, however often a start was tried
    changes = lost.changes()
    assert [change.following for change in changes[:4]] == ["queued", "starting", "running", "queued"]
    assert "goes on from its last checkpoint" in changes[3].reason
    starts = [change.reason for change in changes if change.following == "starting"]
    assert starts[0] != starts[-1], "it is said to run on the machine that is gone"
    assert closed(lost_node.address, port)

    view = undisturbed.wait()
    assert (view.state, view.starts) == ("completed", 1), view
    assert metrics_of(service, lost.job_id) == metrics_of(service, undisturbed.job_id)
    assert weights_of(service, lost.job_id) == weights_of(service, undisturbed.job_id)

    def alive() -> list[dict]:
        return [node for node in control.request("GET", "/cluster")["nodes"] if node["alive"]]

    until(lambda: len(alive()) == 1, "one is dead")
    assert len(control.request("GET", "/cluster")["nodes"]) == 2
    (left,) = alive()
    assert (left["free_cpus"], left["free_gpus"], left["jobs"]) == (3.0, 1.0, 0)
    whole = control.submit(GAMES, cpus=3, gpus=1)  # nothing is held in Ray's own books either
    assert whole.wait().state == "completed"
