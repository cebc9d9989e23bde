"""Queue and start times of the control plane, for Prometheus."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from palestra.types.states import JobState
from palestra_service.api import create_control_app
from palestra_service.store.changes import state_times
from palestra_service.store.control_store import ControlStore
from unit.building import FakeClock
from unit.control.building import control_plane, submit

STATES = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)


async def go(store, clock, job, *moves: tuple[JobState, float]) -> None:
    """Move a job through states, each after so many seconds."""
    before = JobState.QUEUED
    for following, seconds in moves:
        clock.advance(seconds)
        await store.change_state(job.job_id, before, following, "a test", url="http://n:1")
        before = following


async def played(store, clock) -> None:
    one, other = await submit(store, "a"), await submit(store, "b")
    lost = [(JobState.QUEUED, 5.0), (JobState.STARTING, 100.0), (JobState.RUNNING, 1.0)]
    await go(store, clock, one, (JobState.STARTING, 10.0), (JobState.RUNNING, 2.0), *lost)
    await go(store, clock, other, (JobState.STARTING, 0.5), (JobState.FAILED, 3.0))


async def test_each_start_of_a_job_counts_once_and_a_failed_start_has_only_its_queue_time(store, clock):
    await played(store, clock)
    found = await store.read(lambda c: state_times(c, None, (1.0, 60.0)))
    queued, starting, _ = STATES
    assert found["a", queued] == ([0, 1, 1], pytest.approx(110.0))
    assert found["a", starting] == ([1, 1, 0], pytest.approx(3.0))
    assert {state for tenant, state in found if tenant == "b"} == {queued}
    assert {tenant for tenant, _ in await store.read(lambda c: state_times(c, "a", (1.0,)))} == {"a"}


async def test_the_route_has_histograms_by_tenant(tmp_path):
    clock = FakeClock()
    with ControlStore(f"sqlite:///{tmp_path / 'control.db'}", clock) as store:
        plane = control_plane(store, tmp_path, without_keys=True)
        await plane.administration.first_start()
        await played(store, clock)
        transport = httpx2.ASGITransport(create_control_app(plane))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            text = (await http.get("/metrics")).text
    samples = {
        (sample.name, sample.labels["tenant"], sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["palestra_job_queue_seconds_count", "a", None] == 2
    assert samples["palestra_job_queue_seconds_bucket", "a", "15.0"] == 1
    assert samples["palestra_job_queue_seconds_bucket", "a", "+Inf"] == 2
    assert samples["palestra_job_start_seconds_sum", "a", None] == pytest.approx(3.0)
