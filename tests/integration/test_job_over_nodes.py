"""One job over three machines: its bundles, weights between them, and what becomes of it when one machine is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from nodes import Node, Nodes, cluster
from safetensors.numpy import load_file
from service import GAMES, Service, metrics_of, until

from palestra.errors import InvalidRequest

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]  # of two jobs one after another, on a busy machine
POOL = GAMES | {
    "engine": {"kind": "fake", "reply_tokens": 3, "delay_seconds": 0.05, "replicas": 2},
    "environment": {**GAMES["environment"], "runners": 1},
    "steps": 8,
}
SPREAD: dict[str, Any] = {
    "bundles": [{"role": "engine", "cpus": 1}, {"role": "runner", "cpus": 1}],
    "placement": "SPREAD",
}
# A real model: one inference worker and two ranks, each with a core of its own.
MODEL = GAMES | {
    "model": "tiny-random",
    "engine": {"kind": "embedded", "dtype": "float32", "threads": 1},
    "trainer": {"dtype": "float32", "threads": 1, "devices": 2, "stuck_seconds": 60.0},
    "rollout": {"group_size": 4, "groups_per_step": 2},
    "steps": 4,
}
RANKS: dict[str, Any] = {
    "bundles": [{"role": "engine", "cpus": 0.5}, {"role": "trainer", "cpus": 1, "memory_gib": 2}],
    "placement": "SPREAD",
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        for zone in ("a", "a", "b"):
            nodes.add(cpus=3, labels=f"zone={zone}")
        yield nodes


@pytest.fixture(scope="module")
def service(nodes, tmp_path_factory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), ("--ray-address", nodes.address)) as service:
        yield service.start()


def where(job, nodes: Nodes) -> tuple[Node, list[Node]]:
    """The machine of a job's own process, and those that have its inference workers."""
    host = urlsplit(job.wait_for_server().url).hostname
    own = next(node for node in nodes.nodes if node.address == host)
    return own, [node for node in nodes.nodes if node.programs("palestra.runtime.engine_process")]


def test_bundles_are_refused_with_one_line_where_no_machine_will_do(service):
    control = service.client()
    for bundle, said in (
        ({"role": "engine", "cpus": 9}, r"needs 9 CPUs on one node for each process of its engine bundle"),
        ({"role": "engine", "cpus": 1, "labels": {"zone": "c"}}, r"needs a node with label zone = c for each process"),
        ({"role": "trainer", "cpus": 1}, r"role 'trainer', and the job has no such process: set trainer.devices"),
        ({"role": "engine", "count": 3}, r"count is 3, and engine.replicas is 2; leave count out"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            control.submit(POOL, bundles=[bundle])
    zones = {node["labels"]["zone"] for node in control.request("GET", "/cluster")["nodes"]}
    assert zones == {"a", "b"}


def test_a_job_over_machines_heals_when_one_is_lost_and_ends_as_if_nothing_had_happened(nodes, service):
    control = service.client()
    calm = control.submit(POOL, **SPREAD)
    assert calm.wait().state == "completed"
    job = control.submit(POOL, **SPREAD)
    checkpoints = service.state / "jobs" / job.job_id / "run" / "checkpoints"
    own, others = where(job, nodes)
    lost = next(node for node in others if node not in (own, nodes.nodes[0]))  # the first has Ray's head
    until(lambda: (checkpoints / "step-000002").exists(), "it has trained")

    lost.kill()
    view = job.wait()
    assert (view.state, view.restarts_left) == ("completed", 2), view
    assert any("is gone" in change.reason for change in job.changes())
    assert metrics_of(service, job.job_id) == metrics_of(service, calm.job_id)
    weights = [
        max((service.state / "jobs" / one / "run" / "checkpoints").glob("step-*")) for one in (calm.job_id, job.job_id)
    ]
    assert (weights[0] / "weights.txt").read_text() == (weights[1] / "weights.txt").read_text()
    until(lambda: not any(node.programs("palestra.runtime") for node in nodes.nodes if node is not lost), "all ended")
    nodes.add(cpus=3, labels="zone=b")  # for the tests below
    until(lambda: sum(node["alive"] for node in control.request("GET", "/cluster")["nodes"]) == 3, "it has joined")


@pytest.mark.slow
def test_ranks_and_an_inference_worker_on_other_machines_train_the_same_weights_after_a_loss(nodes, service):
    control = service.client()
    runs = {}
    for name in ("calm", "hurt"):
        job = runs[name] = control.submit(MODEL, **RANKS)
        checkpoints = service.state / "jobs" / job.job_id / "run" / "checkpoints"
        own = urlsplit(job.wait_for_server().url).hostname
        ranks = [node for node in nodes.nodes if node.programs("palestra_sharded.processes")]
        assert len(ranks) == 2, "the ranks are on two machines"
        if name == "hurt":
            until(lambda: (checkpoints / "step-000002").exists(), "it has trained", 120)  # noqa: B023
            next(node for node in ranks if node.address != own and node is not nodes.nodes[0]).kill()
        view = job.wait()
        assert (view.state, view.starts) == ("completed", 1 if name == "calm" else 2), view
    found = [max((service.state / "jobs" / job.job_id / "run" / "checkpoints").glob("step-*")) for job in runs.values()]
    first, second = (load_file(path / "model.safetensors") for path in found)
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first), "bit for bit"
    rows = [json.loads(line) for line in (found[1].parent.parent / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert sorted(steps) == sorted(set(steps)), "no step twice"
    assert any(row.get("train/grad_norm", 0.0) > 0.0 for row in rows), "equal weights say something"
