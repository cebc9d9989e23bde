"""Jobs of a service whose engine is vLLM, on two machines; vLLM itself is scripted, and all processes are real."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest
from nodes import Node, Nodes, cluster
from service import GAMES, Service, lives, metrics_of, until
from unit.engine.engine_servers import KEY, listening, of_tiny_random
from unit.engine.scripted_vllm import with_long_context, write_interpreter

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]
VLLM = {"kind": "vllm", "dtype": "float32", "threads": 1}
JOB = {name: value for name, value in GAMES.items() if name not in ("deterministic", "engine")} | {
    "policies": {"policy": {"model": "tiny-random", "max_context": 2048, "sampling": {"max_tokens": 4}}},
    "engine": VLLM,
    "trainer": {"threads": 1, "dtype": "float32"},
    "rollout": {"group_size": 4, "groups_per_step": 2},
}
LONG = JOB | {"steps": 100_000}
PROGRAM = "unit.engine.scripted_vllm"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with cluster(tmp_path_factory.mktemp("nodes")) as nodes:
        for _ in range(2):
            nodes.add(cpus=3, settings={"SERVER_KEY": KEY})
        yield nodes


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that runs already, in a thread of this process."""
    urls: queue.Queue[str] = queue.Queue()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with listening(of_tiny_random(with_long_context())) as port:
            urls.put(f"http://127.0.0.1:{port}")
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield urls.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def service(nodes, server, tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("operator")
    (folder / "rules.toml").write_text(
        f'[engines.vllm]\npython = "{write_interpreter(folder)}"\n'
        f'[[engines.servers]]\nkind = "vllm"\nurl = "{server}"\nkey_variable = "SERVER_KEY"\n'
    )
    options = ("--ray-address", nodes.address, "--rules", str(folder / "rules.toml"), "--pass-env", "SERVER_KEY")
    with Service(tmp_path_factory.mktemp("service"), options) as service:
        yield service.start()


def servers_of(node: Node) -> list[psutil.Process]:
    """The servers that a machine runs now."""
    found = []
    for process in node.processes():
        with contextlib.suppress(psutil.Error):  # it ends at this moment
            if PROGRAM in " ".join(process.cmdline()):
                found.append(process)
    return found


def of_job(job, nodes: Nodes) -> tuple[Node, Node]:
    """The machine of a job's own process, and the other one."""
    host = urlsplit(job.wait_for_server().url).hostname
    first, second = nodes.nodes
    return (first, second) if first.address == host else (second, first)


def steps_of(service: Service, job_id: str) -> list[int]:
    return [row["step"] for row in metrics_of(service, job_id) if row["step"]]


def has_trained(service: Service, job_id: str) -> bool:
    rows = service.state / "jobs" / job_id / "run" / "metrics.jsonl"
    return rows.exists() and len(steps_of(service, job_id)) >= 2


def test_the_server_of_a_job_without_bundles_is_beside_it_and_ends_with_it(nodes, service):
    job = service.client().submit(LONG)
    assert job.view().resources.cpus == 2.0
    assert job.view().config["engine"] == VLLM
    own, other = of_job(job, nodes)
    (server,) = servers_of(own)
    assert not servers_of(other)
    until(lambda: has_trained(service, job.job_id), "it trains", 200)
    job.cancel()
    assert job.wait().state == "cancelled"
    until(lambda: not lives(server) and not servers_of(own), "its server has ended with it")


def test_a_server_on_another_machine_gets_the_weights_there_and_is_replaced_when_it_dies(nodes, service):
    bundle = {"role": "engine", "cpus": 1}
    job = service.client().submit(LONG | {"steps": 30}, bundles=[bundle], placement="SPREAD")
    own, other = of_job(job, nodes)
    (server,) = servers_of(other)
    assert not servers_of(own)
    until(lambda: has_trained(service, job.job_id), "it trains", 200)
    server.kill()
    until(lambda: [one for one in servers_of(other) if one != server], "another one is started there", 120)
    view = job.wait()
    assert (view.state, view.starts) == ("completed", 1), (view, "".join(job.logs()))
    assert steps_of(service, job.job_id) == list(range(1, 31))
    until(lambda: not servers_of(own) and not servers_of(other), "none is left")


@pytest.mark.long
def test_embedded_workers_and_vllm_are_one_pool_over_two_machines(nodes, service):
    workers = [{"threads": 1, "dtype": "float32"}, VLLM]
    bundle = {"role": "engine", "cpus": 1}
    job = service.client().submit(JOB | {"engine": {"workers": workers}}, bundles=[bundle], placement="SPREAD")
    assert [part.count for part in job.view().resources.bundles] == [2]
    view = job.wait()
    assert (view.state, view.starts) == ("completed", 1), (view, "".join(job.logs()))
    assert steps_of(service, job.job_id) == [1, 2, 3]
    until(lambda: not any(map(servers_of, nodes.nodes)), "none is left")


def test_a_server_that_runs_already_is_for_one_job_at_a_time_and_its_key_is_in_no_file_of_a_job(service, server):
    control = service.client()
    engine = {"kind": "vllm", "url": server, "dtype": "float32"}
    first, second = (control.submit(config | {"engine": engine}) for config in (LONG, JOB))
    assert first.view().resources.cpus == 1.0, "the server is none of its processes"
    until(lambda: has_trained(service, first.job_id), "it trains", 200)
    until(lambda: "which another job uses" in second.view().reason, "the other one waits")
    assert second.view().reason == f"waits for the engine's server {server}, which another job uses"
    first.cancel()
    assert second.wait().state == "completed"
    for job in (first, second):
        assert job.view().config["engine"] == engine
        files = [path for path in (service.state / "jobs" / job.job_id).rglob("*") if path.is_file()]
        assert any(b"SERVER_KEY" in path.read_bytes() for path in files), "the name of the variable"
        assert not [path for path in files if KEY.encode() in path.read_bytes()]
