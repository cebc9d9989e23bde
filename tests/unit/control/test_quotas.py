"""Quotas and draining as the operator sets them: stored, and used at once by a scheduler that runs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx2
import pytest

from palestra.types.states import JobState
from palestra_service.api import create_control_app
from palestra_service.jobs.launcher import Ending
from palestra_service.store.control_store import ControlStore
from unit.building import FakeClock
from unit.control.building import control_plane, submit
from unit.control.launching import FakeLauncher

EMPTY = dict.fromkeys(("jobs", "cpus", "gpus", "memory_gib", "adapters", "weight", "money", "hours", "tokens"))


class Operator:
    """A control plane that schedules, and its operator."""

    def __init__(self, store: ControlStore, folder, launcher: FakeLauncher | None = None) -> None:
        self.store, self.launcher = store, launcher or FakeLauncher()
        self.plane = control_plane(store, folder, self.launcher, without_keys=True)
        self.scheduler = self.plane.scheduler
        transport = httpx2.ASGITransport(create_control_app(self.plane), raise_app_exceptions=False)
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    async def quota(self, tenant: str, **amounts: float | None) -> dict:
        answer = await self.http.patch(f"/tenants/{tenant}", json={"quota": amounts})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def becomes(self, job_id: str, state: JobState) -> None:
        async with asyncio.timeout(60):
            while (await self.store.job(None, job_id)).state is not state:
                await asyncio.sleep(0.01)

    async def waits(self, job_id: str, why: str) -> None:
        async with asyncio.timeout(60):
            while why not in self.scheduler.waiting.get(job_id, ""):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def operating(folder):
    with ControlStore(f"sqlite:///{folder / 'control.db'}", FakeClock()) as store:
        operator = Operator(store, folder)
        await operator.plane.administration.first_start()
        scheduling = asyncio.ensure_future(operator.scheduler.run())
        try:
            async with operator.http:
                yield operator
        finally:
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)


@pytest.fixture
async def operator(tmp_path):
    async with operating(tmp_path) as found:
        assert (await found.http.post("/tenants", json={"name": "blue"})).status_code == 201
        yield found


async def test_a_quota_counts_at_once_for_what_waits_and_for_what_is_submitted(operator, monkeypatch):
    monkeypatch.setattr("palestra_service.jobs.scheduler.LOOK_SECONDS", 3600.0)  # only an event wakes it
    await operator.scheduler.ready.wait()
    await operator.quota("blue", jobs=1)
    first = await submit(operator.store, "blue")
    await operator.becomes(first.job_id, JobState.RUNNING)
    second = await submit(operator.store, "blue")  # not before: of two of the same age either may be first
    await operator.waits(second.job_id, "quota of tenant blue: 1 of 1 jobs")
    await operator.quota("blue", jobs=2)
    await operator.becomes(second.job_id, JobState.RUNNING)
    await operator.quota("default", gpus=1)
    answer = await operator.http.post("/jobs", json={"config": {}, "resources": {"gpus": 2}})
    assert answer.status_code == 422
    assert "needs 2 GPUs; the quota of tenant default is 1" in answer.text
    await operator.quota("default", gpus=None)
    assert (await operator.http.post("/jobs", json={"config": {}, "resources": {"gpus": 2}})).status_code == 201


async def test_what_runs_goes_on_under_a_smaller_quota(operator):
    job = await submit(operator.store, "blue")
    await operator.becomes(job.job_id, JobState.RUNNING)
    await operator.quota("blue", jobs=0)
    later = await submit(operator.store, "blue")
    await operator.waits(later.job_id, "quota of tenant blue")
    assert (await operator.store.job(None, job.job_id)).state is JobState.RUNNING
    operator.launcher.end(job.job_id, Ending.COMPLETED)
    await operator.becomes(job.job_id, JobState.COMPLETED)
    await operator.waits(later.job_id, "quota of tenant blue: 0 of 0 jobs")


async def test_a_job_that_is_submitted_under_a_new_quota_is_not_started_under_the_old_one(operator):
    """Also where both come while the scheduler is at work."""
    await operator.scheduler.ready.wait()
    nodes, found = operator.launcher.nodes, []

    async def slow():
        if not found:
            await operator.quota("blue", jobs=0)
            found.append(await submit(operator.store, "blue"))
        return await nodes()

    operator.launcher.nodes = slow
    await submit(operator.store, "default")  # wakes it
    async with asyncio.timeout(60):
        while not found:
            await asyncio.sleep(0.01)
    await operator.waits(found[0].job_id, "quota of tenant blue")


async def test_what_is_left_out_stays_and_null_takes_a_limit_away(operator):
    first = await operator.quota("blue", gpus=1.5, jobs=3)
    assert first == {"name": "blue", "quota": EMPTY | {"gpus": 1.5, "jobs": 3}, "spent": None}
    assert (await operator.quota("blue", jobs=None, cpus=4))["quota"] == EMPTY | {"gpus": 1.5, "cpus": 4.0}
    assert (await operator.quota("blue"))["quota"] == EMPTY | {"gpus": 1.5, "cpus": 4.0}
    assert (await operator.quota("blue", gpus=None, cpus=None))["quota"] == EMPTY
    found = (await operator.http.get("/tenants")).json()
    assert found == [{"name": name, "quota": EMPTY, "spent": None} for name in ("blue", "default")]


@pytest.mark.parametrize("name", ["green", "..", "blue%00", "x" * 300])
async def test_the_quota_of_a_tenant_that_is_not_there_is_404(operator, name):
    assert (await operator.http.patch(f"/tenants/{name}", json={"quota": {"jobs": 1}})).status_code == 404


@pytest.mark.parametrize("quota", [None, 1, {"jobs": -1}, {"jobs": 1.5}, {"gpus": 1e300}, {"gpu": 1}, {"cpus": "many"}])
async def test_what_is_no_quota_is_refused_and_changes_nothing(operator, quota):
    await operator.quota("blue", jobs=3)
    assert (await operator.http.patch("/tenants/blue", json={})).status_code == 422
    assert (await operator.http.patch("/tenants/blue", json={"quota": quota})).status_code == 422
    assert (await operator.quota("blue"))["quota"]["jobs"] == 3


async def test_a_change_is_in_the_operators_audit_log_and_in_no_other(operator):
    await operator.quota("blue", gpus=2, memory_gib=16)
    line = (await operator.store.audit("default"))[0]
    assert (line.what, line.target) == ("tenant.change", "quota of blue: 2 GPUs, 16 GiB")
    assert await operator.store.audit("blue") == []


async def test_a_tenant_sees_its_own_quota_and_what_of_it_is_in_use(operator):
    await operator.quota("blue", jobs=7)
    await operator.quota("default", gpus=2)
    theirs, mine = await submit(operator.store, "blue"), await submit(operator.store, "default")
    for job in (theirs, mine):
        await operator.becomes(job.job_id, JobState.RUNNING)
    seen = (await operator.http.get("/cluster")).json()
    assert seen["quota"] == EMPTY | {"gpus": 2.0}
    assert seen["in_use"] == {"jobs": 1, "cpus": 1.0, "gpus": 0.0, "memory_gib": 0.0}
    assert seen["spent"] is None
    await operator.quota("default", tokens=90)
    assert (await operator.http.get("/cluster")).json()["spent"] == {"money": 0.0, "hours": 0.0, "tokens": 0}


async def test_quotas_and_draining_are_kept_when_the_control_plane_is_started_again(tmp_path):
    async with operating(tmp_path) as before:
        await before.http.post("/tenants", json={"name": "blue"})
        await before.quota("blue", jobs=0)
        assert (await before.http.post("/cluster/drain", json={"on": True})).status_code == 204
        assert (await before.http.get("/cluster")).json()["draining"]
    async with operating(tmp_path) as again:
        jobs = [await submit(again.store, tenant) for tenant in ("blue", "default")]
        for job in jobs:
            await again.waits(job.job_id, "draining")
        assert (await again.http.get("/cluster")).json()["draining"]
        await again.http.post("/cluster/drain", json={"on": False})
        await again.becomes(jobs[1].job_id, JobState.RUNNING)
        await again.waits(jobs[0].job_id, "quota of tenant blue")
