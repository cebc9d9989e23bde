"""Where the processes of jobs go on real nodes: by the kind of GPU that Ray has found there, and by `placement`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from nodes import Nodes, cluster
from service import GAMES, LONG, Service, until

from palestra.errors import InvalidRequest
from palestra_control.job import Job

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]
ENGINE = "palestra.runtime.engine_process"
KINDS, ZONES = ("A100", "H100", None), "abc"  # of the nodes' GPUs, and of the nodes, in their order
POOL = {"engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.02, "replicas": 2}}
ENGINES: dict[str, Any] = {"role": "engine", "cpus": 1}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    """Three nodes. Of two, Ray believes to have asked a driver for the kind of their GPUs.

    `ray start --labels` refuses names of Ray's own, so the label comes the way on which an autoscaler sets it.
    """
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        for kind, zone in zip(KINDS, ZONES, strict=True):
            label = {} if kind is None else {"RAY_OVERRIDE_LABELS": json.dumps({"ray.io/accelerator-type": kind})}
            nodes.add(cpus=3, gpus=0 if kind is None else 1, settings=label, labels=f"zone={zone}")
        yield nodes


@pytest.fixture(scope="module")
def service(nodes, tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), ("--ray-address", nodes.address)) as service:
        yield service.start()


@pytest.fixture
def submit(nodes, service) -> Iterator[Callable[..., Job]]:
    """Submit a job, which is over when the test is, and leaves no process behind."""
    control, jobs = service.client(), list[Job]()

    def send(config: Mapping[str, Any], **more: Any) -> Job:
        jobs.append(control.submit(config, **more))
        return jobs[-1]

    yield send
    for job in jobs:
        if job.view().state not in ("completed", "failed", "cancelled"):
            job.cancel()
    for job in jobs:
        job.wait()
    until(lambda: not workers_of(nodes), "no worker is left")


def own_node(job: Job, nodes: Nodes) -> int:
    """The node of a job's own process, by its number."""
    host = urlsplit(job.wait_for_server().url).hostname
    return next(number for number, node in enumerate(nodes.nodes) if node.address == host)


def workers_of(nodes: Nodes) -> list[int]:
    """The nodes of the inference workers that run now, one entry a worker. One job runs at a time."""
    return [number for number, node in enumerate(nodes.nodes) for _ in node.programs(ENGINE)]


def test_a_job_goes_to_the_kind_of_gpu_that_it_asks_for(nodes, service, submit):
    control = service.client()
    shown = {node["labels"]["zone"]: node for node in control.request("GET", "/cluster")["nodes"]}
    assert [shown[zone]["gpu_kind"] for zone in ZONES] == [*KINDS]
    assert all(node["labels"].keys() == {"zone"} for node in shown.values()), "Ray's labels are not an operator's"
    for number, kind in enumerate(KINDS[:2]):
        job = submit(GAMES, cpus=1, gpus=1, gpu_kind=kind)
        assert own_node(job, nodes) == number
        assert job.wait().state == "completed"


def test_bundles_go_to_the_kind_of_gpu_that_they_ask_for_also_where_another_one_is_nearer(nodes, service, submit):
    control = service.client()
    one = LONG | {"engine": {**LONG["engine"], "replicas": 1}}
    for own, other in ((0, 1), (1, 0)):
        job = submit(
            one,
            cpus=1,
            gpus=1,
            gpu_kind=KINDS[own],
            bundles=[ENGINES | {"gpus": 1, "gpu_kind": KINDS[other]}],
            placement="PACK",
        )
        assert own_node(job, nodes) == own
        until(lambda: workers_of(nodes) == [other], "its worker is on the other node")  # noqa: B023
        machines = control.request("GET", "/cluster")["nodes"]
        assert {node["gpu_kind"]: node["gpus"] - node["free_gpus"] for node in machines} == {
            "A100": 1,
            "H100": 1,
            None: 0,
        }
        job.cancel()
        job.wait()
        until(lambda: not workers_of(nodes), "its worker has ended")


def test_a_kind_that_no_node_has_is_refused_and_one_that_is_taken_is_waited_for(nodes, service, submit):
    control = service.client()
    with pytest.raises(InvalidRequest, match=r"GPUs.*B200"):
        control.submit(GAMES, cpus=1, gpus=1, gpu_kind="B200")
    with pytest.raises(InvalidRequest, match=r"GPUs.*B200"):
        control.submit(GAMES | POOL, bundles=[ENGINES | {"gpus": 1, "gpu_kind": "B200"}])
    first = submit(LONG, cpus=1, gpus=1, gpu_kind="H100")
    assert own_node(first, nodes) == 1
    second = submit(GAMES, cpus=1, gpus=1, gpu_kind="H100")
    until(lambda: second.view().reason, "it is said why the second one waits")
    assert second.view().state == "queued", "the GPU of another kind is free, and not taken"
    first.cancel()
    assert own_node(second, nodes) == 1
    assert second.wait().state == "completed"


@pytest.mark.parametrize(
    ("placement", "nodes_used"), [("STRICT_PACK", 1), pytest.param("PACK", 1, marks=pytest.mark.long), ("SPREAD", 3)]
)
def test_a_job_that_fits_on_a_node_is_on_one_or_on_all(placement, nodes_used, nodes, submit):
    job = submit(LONG | POOL, cpus=1, bundles=[ENGINES], placement=placement)
    own = own_node(job, nodes)
    until(lambda: len(workers_of(nodes)) == 2, "both workers run")
    assert len({own, *workers_of(nodes)}) == nodes_used


def test_a_packed_job_that_fits_on_no_node_fills_one_and_takes_a_second(nodes, service, submit):
    """Four processes on nodes with room for three; together or not at all where it is to be strict."""
    control = service.client()
    three = LONG | {"engine": {**POOL["engine"], "replicas": 3}}
    with pytest.raises(InvalidRequest, match="never start"):
        control.submit(three, cpus=1, bundles=[ENGINES], placement="STRICT_PACK")
    job = submit(three, cpus=1, bundles=[ENGINES], placement="PACK")
    own = own_node(job, nodes)
    until(lambda: len(workers_of(nodes)) == 3, "all workers run")
    assert sorted(Counter([own, *workers_of(nodes)]).values()) == [1, 3]


def test_a_strictly_packed_job_waits_for_one_node_where_the_others_have_room_together(nodes, submit):
    small = [submit(LONG, cpus=1, labels={"zone": zone}) for zone in ZONES]
    assert [own_node(each, nodes) for each in small] == [0, 1, 2], "each node has room for two more processes"
    strict, packed = (
        submit(GAMES | POOL, cpus=1, bundles=[ENGINES], placement=placement) for placement in ("STRICT_PACK", "PACK")
    )
    assert packed.wait().state == "completed", packed.changes()
    assert strict.view().state == "queued"
    assert "waits for" in strict.view().reason
    small[2].cancel()
    assert own_node(strict, nodes) == 2
    assert strict.wait().state == "completed", strict.changes()
