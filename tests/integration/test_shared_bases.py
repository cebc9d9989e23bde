"""A service whose jobs share base servers: one process for several jobs, which dies, ends and keeps others out."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import safetensors.torch
import torch
from servers import TINY
from service import Service, lives, until

from palestra.errors import InvalidRequest, TooManyRequests, Unauthorized
from palestra_bases.link import Link

pytestmark = pytest.mark.service
POLICY = TINY["policies"]["policy"] | {"adapter": {"rank": 4}, "optimizer": {"learning_rate": 3e-2}}
ALONE = {
    "steps": 3,
    "deterministic": True,
    "policies": {"policy": POLICY},
    "environment": {"name": "prisoners-dilemma", "train_tasks": 6, "validation_tasks": 2},
    "rollout": {"group_size": 4, "groups_per_step": 2},
    "checkpoint": {"every_steps": 1},
}
SHARED = ALONE | {"policies": {"policy": POLICY | {"base": "shared"}}}
LONG = SHARED | {"steps": 1000}
RULES = "[bases]\ncpus = 1\nadapters = 3\nidle_seconds = 4\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("bases")
    (folder / "rules.toml").write_text(RULES)
    with Service(folder, ("--cpus", "3", "--rules", str(folder / "rules.toml"))) as service:
        yield service.start()


@pytest.fixture(autouse=True)
def _no_job_is_left(service) -> Iterator[None]:
    """A test that fails leaves its jobs, which would hold the room of the next."""
    yield
    control = service.client()
    for view in control.jobs():
        if view.state in ("queued", "starting", "running"):
            control.job(view.job_id).cancel()


def bases(service) -> list[dict]:
    return service.client().request("GET", "/cluster")["bases"]


def process_of(service, base_id: str) -> psutil.Process:
    """The process that has the base server's log open."""
    log = str(service.state / "bases" / base_id / "log.txt")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == log for file in process.open_files()):
                found.append(process)
    assert len(found) == 1, found
    return found[0]


def steps(service, job) -> int:
    """Checkpoints that the job has written: the number of the newest."""
    folders = (service.state / "jobs" / job.job_id / "run" / "checkpoints").glob("step-*")
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


def tensors(service, job) -> dict[str, torch.Tensor]:
    folder = service.state / "jobs" / job.job_id / "run" / "checkpoints" / "step-000003"
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def loads_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def running(job) -> bool:
    view = job.view()
    assert view.state in ("queued", "starting", "running"), (view.state, view.reason)
    return view.state == "running"


def completed(job) -> bool:
    view = job.wait()
    assert view.state == "completed", (view.state, view.reason)
    return True


def ended_or_idle(service) -> None:
    until(lambda: not bases(service), "the base servers have ended", 90)


def refused(address: str, key: str) -> bool:
    """Whether a base server lets a job with this key in."""

    async def call() -> None:
        link = Link(address, key, "somebody", patience_seconds=5.0)
        try:
            await link.renew()
        finally:
            await link.leave()

    try:
        asyncio.run(call())
    except Unauthorized:
        return True
    return False


@pytest.mark.timeout(500)
def test_jobs_share_a_process_that_may_die_and_get_the_weights_of_a_job_alone(service):
    control = service.client()
    alone = control.submit(ALONE, name="alone")
    assert completed(alone)
    jobs = [control.submit(SHARED, name=f"shared-{number}") for number in range(2)]
    until(lambda: all(running(job) for job in jobs), "both run", 120)
    (base,) = bases(service)
    assert (base["model"], base["deterministic"], base["state"]) == ("tiny-random", True, "serving")
    assert (base["jobs"], base["own_jobs"], base["adapters"]) == (2, 2, 2)
    process = process_of(service, base["base_id"])
    assert loads_torch(process)
    light = [one for job in jobs for one in service.processes_of(job.job_id) if one.pid != process.pid]
    assert len(light) == 2
    assert not any(map(loads_torch, light))
    assert [job.view().resources.cpus for job in jobs] == [0.25, 0.25]
    until(lambda: steps(service, jobs[0]) >= 1, "the first step is trained", 90)
    process.kill()
    assert all(completed(job) for job in jobs)
    (again,) = bases(service)
    assert (again["base_id"], again["starts"]) == (base["base_id"], 2)
    assert [job.view().starts for job in jobs] == [1, 1]
    wanted = tensors(service, alone)
    assert any(bool(tensor.any()) for name, tensor in wanted.items() if "lora_B" in name)
    for job in jobs:
        assert_same(tensors(service, job), wanted)
    ended_or_idle(service)  # nothing is left for `idle_seconds`


@pytest.mark.timeout(500)
def test_a_control_plane_that_is_killed_finds_its_base_server_and_a_cancelled_job_frees_its_place(service):
    control = service.client()
    first, second = control.submit(LONG), control.submit(LONG)
    until(lambda: running(first) and running(second), "both run", 120)
    (base,) = bases(service)
    process = process_of(service, base["base_id"])
    keys = [(service.state / "jobs" / job.job_id / "base_key") for job in (first, second)]
    stolen = keys[0].read_text()
    log = (service.state / "bases" / base["base_id"] / "log.txt").read_text()
    address = re.search(r"at (ws://127\.0\.0\.1:\d+)", log)[1]
    service.processes[-1].kill()
    service.start()
    (found,) = until(lambda: bases(service), "the base server is found")
    assert (found["base_id"], found["starts"], found["jobs"]) == (base["base_id"], 1, 2)
    assert lives(process)
    before = steps(service, second)
    first.cancel()
    assert first.wait().state == "cancelled"
    until(lambda: bases(service)[0]["adapters"] == 1, "its place is free")
    until(lambda: not keys[0].exists(), "its key is deleted")
    until(lambda: refused(address, stolen), "its key opens nothing")  # base servers look twice a second
    assert refused(address, "pb-" + "0" * 48)
    assert not refused(address, keys[1].read_text())
    until(lambda: steps(service, second) > before, "the other goes on", 90)
    second.cancel()
    assert second.wait().state == "cancelled"
    ended_or_idle(service)
    until(lambda: not lives(process), "its process is gone")


@pytest.mark.long
@pytest.mark.timeout(500)
def test_another_kind_of_base_gets_a_server_of_its_own_and_an_idle_one_makes_room(service):
    control = service.client()
    first = control.submit(SHARED | {"steps": 1})
    assert completed(first)
    (idle,) = bases(service)
    second = control.submit(LONG | {"deterministic": False}, cpus=2)  # 1 + 1 + 2 cores, and there are 3
    until(lambda: running(second), "it runs", 120)
    (other,) = bases(service)
    assert other["base_id"] != idle["base_id"]
    assert not other["deterministic"]
    second.cancel()
    assert second.wait().state == "cancelled"
    ended_or_idle(service)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_what_a_job_has_trained_is_served_on_a_shared_base_and_trained_on(service):
    control = service.client()
    trained = control.submit(SHARED | {"steps": 1})
    assert completed(trained)
    served = control.submit(from_job=trained.job_id)
    further = control.submit(from_job=trained.job_id, kind="training")
    server = served.wait_for_server()
    with openai.OpenAI(base_url=server.url + "/v1", api_key=server.api_key) as client:
        said = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "C or D?"}])
    assert said.usage.completion_tokens > 0
    assert completed(further)
    (base,) = bases(service)
    assert base["jobs"] == 1
    served.cancel()
    ended_or_idle(service)


def test_what_can_not_be_is_refused_when_it_is_submitted(service):
    control = service.client()
    elsewhere = ALONE | {"policies": {"policy": POLICY | {"base": "ws://127.0.0.1:7413"}}}
    with pytest.raises(InvalidRequest, match="service chooses"):
        control.submit(elsewhere)
    said = service.command("tenants", "quota", "default", "--adapters", "0", "--weight", "2")
    assert said.stdout == "default              adapters 0, weight 2\n", said.stderr
    with pytest.raises(TooManyRequests, match="cancelled frees"):
        control.submit(SHARED)
    service.command("tenants", "quota", "default", "--none")
