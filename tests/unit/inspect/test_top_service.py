"""`palestra top` of a service: jobs with the reason why each waits, machines, quota, and the newest running job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest

from palestra.cli.main import main
from palestra.dashboard.access import OneTimeLink
from palestra.dashboard.routes import create_page_app
from palestra.errors import NotFound
from palestra.http.server import listen, served, url_of
from palestra.terminal import TerminalConsole
from palestra.types.gpus import GpuUse
from palestra_control.control import ControlClient
from palestra_control.wire import ClusterView, InUse, JobView, NodeView, QuotaBody, ResourcesBody
from palestra_inspect import top_view as top_service
from unit.dashboard.recorded import record

NODE = {"alive": True, "draining": False, "memory_gib": 8.0, "free_gpus": 0.0, "free_memory_gib": 8.0}


CARDS = [
    GpuUse(index=0, utilisation=0.37, memory_used_bytes=12 * 2**30, memory_bytes=80 * 2**30),
    GpuUse(index=1, memory_bytes=80 * 2**30),  # cut up by MIG
    GpuUse(index=2, problem="lost"),
]


def job(number: int, state: str, reason: str, name: str = "addition") -> JobView:
    return JobView(
        job_id=f"job-{number}",
        name=name,
        user="ada",
        kind="training",
        priority="normal",
        state=state,
        reason=reason,
        resources=ResourcesBody(),
        attached=False,
        created_at=1.0,
        changed_at=time.time() - 90,
        starts=1,
        restarts_left=0,
        node="n1",
        cancel_requested=False,
        config={},
        log_tail=None,
    )


class Service:
    """A control plane that answers with what the test has put there; `page` has the runs of its jobs."""

    def __init__(self, jobs: list[JobView], page: ControlClient | Exception) -> None:
        self._jobs, self._page = jobs, page

    def jobs(self):
        return iter(self._jobs)

    def request(self, method: str, path: str, answer: object, **more: object) -> object:
        if path != "/cluster":
            if isinstance(self._page, Exception):
                raise self._page
            return self._page.request(method, path, answer, **more)
        nodes = [NodeView(node_id="n1", cpus=8.0, gpus=2, free_cpus=2.5, jobs=3, gpu_use=CARDS, **NODE)]
        held = InUse(jobs=2, cpus=4.0, gpus=1.0, memory_gib=3.0)
        return ClusterView(nodes=nodes, draining=False, queued=4, live=3, quota=QuotaBody(jobs=5), in_use=held)


def drawn(service: Service, capsys, width: int = 160) -> str:
    TerminalConsole(width=width).print(top_service.service_view(service, width, time.time()))
    return capsys.readouterr().out


def test_each_job_has_its_state_and_why_it_waits(capsys):
    jobs = [job(3, "queued", "waits for 4 cpus: 2.5 are free"), job(2, "failed", "\x1b[2Jout of memory", "a\x07b")]
    text = drawn(Service(jobs, NotFound("no server")), capsys)
    for part in ("job-3", "queued", "waits for 4 cpus: 2.5 are free", "90 s ago", "out of memory"):
        assert part in text
    for part in (
        "37% - -",
        "12/80 GiB -/80 GiB",
        "5.5/8",
        "2/2",
        "jobs 2 of 5",
        "cpus 4,",
        "4 jobs of all tenants wait",
    ):
        assert part in text
    assert "\x1b" not in text
    assert "\x07" not in text


async def test_the_newest_running_job_is_shown_as_the_page_has_it(tmp_path, capsys):
    access, stopping, listener = OneTimeLink(), asyncio.Event(), listen("127.0.0.1", 0)
    run = dataclasses.replace(await record(tmp_path), name="job-1")
    async with served(create_page_app([run], access, stopping), listener, stopping.set):
        with ControlClient(url_of(listener), access._key) as page:
            service = Service([job(2, "queued", "waits"), job(1, "running", "it runs")], page)
            text = await asyncio.to_thread(drawn, service, capsys)
    for part in ("job-1 addition", "step 5/8", "reward", "0.625", "train-000002-02", "slowest calls"):
        assert part in text


def test_a_job_whose_run_can_not_be_read_says_so_and_the_rest_is_shown(capsys):
    text = drawn(Service([job(1, "running", "it runs")], NotFound("has not begun to write its run")), capsys)
    assert "has not begun" in text
    assert "n1" in text


def test_without_runs_and_without_a_service_it_is_one_line(capsys, monkeypatch):
    monkeypatch.delenv("PALESTRA_URL", raising=False)
    with contextlib.suppress(SystemExit):
        assert main(["top", "--once"]) != 0
    said = capsys.readouterr().err
    assert "PALESTRA_URL" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("jobs", [[]])
def test_a_tenant_without_jobs_sees_machines(jobs, capsys):
    assert "no jobs" in drawn(Service(jobs, NotFound("")), capsys)
