"""The scheduler and jobs of several processes: what a launcher is told, and what a later scheduler still knows."""

from __future__ import annotations

import pytest

from palestra.types.states import JobState
from palestra_control.jobs import SHARES, Bundle, Resources
from palestra_service.placement.fitting import NOTHING, Amounts, Node
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, scheduling, submit
from unit.waiting import until

NODES = [Node(node_id=name, cpus=4.0, gpus=2, memory_gib=16.0) for name in ("n1", "n2")]
BUNDLES = (
    Bundle(role="engine", count=2, cpus=2.0, gpus=1.0),
    Bundle(role="trainer", count=1, cpus=1.0, gpus=1.0, memory_gib=3.0),
)
WHOLE = Resources(cpus=1.0, bundles=BUNDLES)


@pytest.fixture
def store(sqlite_store):
    return sqlite_store


def held(scheduler, job_id: str) -> dict[str, Amounts]:
    return {node.node_id: scheduler.running[job_id].held_on(node.node_id) for node in NODES}


async def test_every_process_has_a_place_which_a_later_scheduler_still_counts(store, tmp_path):
    launcher = FakeLauncher(*NODES)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store, resources=WHOLE)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        order, record = launcher.servers[job.job_id].order, await store.job("a", job.job_id)
        assert [bundle.role for bundle in order.bundles] == ["engine", "engine", "trainer"]
        assert [bundle.memory_gib for bundle in order.bundles] == [8.0, 8.0, 3.0]  # half of a node each, or as asked
        assert record.bundle_nodes == tuple(bundle.node for bundle in order.bundles)
        assert {order.node, *record.bundle_nodes} == {"n1", "n2"}
        before = held(scheduler, job.job_id)
        cpus, gpus, memory = (sum(amounts) for amounts in zip(*before.values(), strict=True))
        assert (cpus, gpus, memory) == (6 * SHARES, 3 * SHARES, 3 * 1024)
        small = await submit(store, resources=Resources(cpus=1.0, gpus=2.0))
        await until(lambda: waits(scheduler, small.job_id))
    async with scheduling(store, tmp_path, launcher) as later:
        await until(lambda: waits(later, small.job_id))
        assert held(later, job.job_id) == before
        shares = [(place.node_id, share) for _, place in later.running[job.job_id].places for share in place.devices]
        assert len(set(shares)) == 3, "no device is counted for two processes"
        assert "waits for 2 GPUs" in later.waiting[small.job_id]
        await later.cancel("a", job.job_id, "it is not needed")
        await until(in_state(store, job.job_id, JobState.CANCELLED))
        await until(in_state(store, small.job_id, JobState.RUNNING))
        assert sum(one.held_on("n1").gpus + one.held_on("n2").gpus for one in later.running.values()) == 2 * SHARES


async def waits(scheduler, job_id: str) -> bool:
    return job_id in scheduler.waiting


@pytest.mark.slow
async def test_a_job_waits_until_all_of_it_has_room(store, tmp_path):
    launcher = FakeLauncher(NODES[0])
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store, resources=WHOLE)
        await until(lambda: waits(scheduler, job.job_id))
        assert scheduler.running == {}
        assert "bundle" in scheduler.waiting[job.job_id]
        launcher.machines.append(NODES[1])
        await until(in_state(store, job.job_id, JobState.RUNNING), 20)
        assert held(scheduler, job.job_id)["n2"] != NOTHING
