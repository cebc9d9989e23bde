"""The scheduler and its base servers on a launcher of nothing: starts, deaths, restarts, keys and ends."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from palestra.config import parse_config
from palestra.errors import ConfigError, NodeLost, ServerFailed, TooManyRequests, Unauthorized
from palestra.types.states import BaseState, JobState
from palestra_bases.admissions import FILE, Admissions
from palestra_control.jobs import BaseLoad, Resources
from palestra_service.api.cluster_api import _bases, _in_use
from palestra_service.jobs.admitting import KEY_FILE
from palestra_service.jobs.launcher import Ending
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.shared_jobs import adapters_of
from palestra_service.placement.bases import BaseLimits
from palestra_service.placement.fitting import Node
from palestra_service.placement.tenants import Quota
from palestra_service.store import accounts, bases, decisions
from unit.control.building import identity
from unit.control.launching import FakeLauncher
from unit.control.scheduling import in_state, scheduling, states_of
from unit.control.scheduling import submit as submit_any
from unit.waiting import until

POLICY = {"model": "tiny-random", "base": "shared", "adapter": {"rank": 4}}
CONFIG = {"steps": 3, "policies": {"policy": POLICY}}
LIMITS = BaseLimits(resources=Resources(cpus=1.0), adapters=2, waiting=5, idle_seconds=60.0)
LIGHT = Resources(cpus=0.25)


@pytest.fixture
def store(sqlite_store):
    return sqlite_store


async def submit(store, *arguments, config=CONFIG, **values):
    adapters = adapters_of(parse_config(config))
    return await submit_any(store, *arguments, config=config, resources=LIGHT, adapters=adapters, **values)


def schedules(store, folder, launcher, limits=LIMITS):
    return scheduling(store, folder, launcher, rules=Rules(bases=limits))


def servers_of(launcher) -> list[str]:
    return [name for name in launcher.servers if name.startswith("base-")]


def served(scheduler, *, jobs=None, state=BaseState.SERVING):
    """A condition: there is one base server, in this state, with so many jobs."""

    async def ready() -> bool:
        found = scheduler.bases.running()
        return len(found) == 1 and found[0].state is state and jobs in (None, found[0].jobs)

    return ready


async def test_jobs_of_one_model_share_one_base_server_each_with_a_key_of_its_own(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher) as scheduler:
        jobs = [await submit(store), await submit(store, "b", "ben")]
        for job in jobs:
            await until(in_state(store, job.job_id, JobState.RUNNING))
        (base_id,) = servers_of(launcher)
        order = launcher.servers[base_id].order
        assert (order.model, order.deterministic, order.jobs) == ("tiny-random", False, tmp_path / "jobs")
        assert order.folder == tmp_path / "bases" / base_id
        keys = []
        for job in jobs:
            got = launcher.servers[job.job_id].order
            assert got.config["policies"]["policy"]["base"] == f"http://n1/{base_id}"
            assert got.base_key == tmp_path / "jobs" / job.job_id / KEY_FILE
            assert got.base_key.stat().st_mode & 0o777 == 0o600
            keys.append(got.base_key.read_text())
            assert (await store.job(None, job.job_id)).base_id == base_id
        admissions = Admissions(order.folder / FILE)
        assert [admissions.of(key) for key in keys] == [job.job_id for job in jobs]
        assert not any(key in (order.folder / FILE).read_text() for key in keys)
        (kept,) = await store.read(bases.all_bases)
        assert (kept.state, kept.address, kept.starts) == (BaseState.SERVING, f"http://n1/{base_id}", 1)
        # The first job ends: its key opens nothing, and its place is free.
        launcher.end(jobs[0].job_id, Ending.COMPLETED)
        await until(served(scheduler, jobs=1))
        await until(lambda: _gone(tmp_path / "jobs" / jobs[0].job_id / KEY_FILE))
        admissions.read()
        assert admissions.take_gone() == {jobs[0].job_id}
        with pytest.raises(Unauthorized):
            admissions.of(keys[0])
        assert admissions.of(keys[1]) == jobs[1].job_id


async def _gone(path) -> bool:
    return not path.exists()


async def test_shares_are_those_of_tenants_however_many_jobs_each_has(store, tmp_path):
    launcher = FakeLauncher()
    await store.write(lambda c: accounts.add_tenant(c, "a", 0.0))
    await store.write(lambda c: decisions.change_quota(c, "a", {"weight": 3.0}))
    async with schedules(store, tmp_path, launcher, replace(LIMITS, adapters=3)):
        jobs = [await submit(store), await submit(store), await submit(store, "b", "ben")]
        for job in jobs:
            await until(in_state(store, job.job_id, JobState.RUNNING), 20)
        (base_id,) = servers_of(launcher)

        async def weights() -> bool:
            found = json.loads((tmp_path / "bases" / base_id / FILE).read_text())
            return [found[job.job_id]["weight"] for job in jobs if job.job_id in found] == [1.5, 1.5, 1.0]

        await until(weights)


async def test_another_model_and_a_full_server_start_one_more_and_a_long_queue_does(store, tmp_path):
    launcher = FakeLauncher(Node(node_id="n1", cpus=8.0, gpus=0, memory_gib=64.0))
    other = {"steps": 3, "policies": {"policy": POLICY | {"model": "SmolLM2-135M-Instruct"}}}
    async with schedules(store, tmp_path, launcher):
        for number, config in enumerate((CONFIG, CONFIG, CONFIG, other)):
            job = await submit(store, config=config)
            await until(in_state(store, job.job_id, JobState.RUNNING))
            assert len(servers_of(launcher)) == (1, 1, 2, 3)[number]
        for base_id in servers_of(launcher):
            launcher.servers[base_id].heard(BaseLoad(waiting=6))
        job = await submit(store, config=other)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        assert len(servers_of(launcher)) == 4


async def test_an_idle_one_ends_after_its_time_and_leaves_no_admissions(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        launcher.end(job.job_id, Ending.COMPLETED)
        await until(served(scheduler, jobs=0))
        store.clock.advance(59.0)
        scheduler._changed.notify()
        await until(served(scheduler, jobs=0))
        store.clock.advance(2.0)
        scheduler._changed.notify()
        await until(lambda: _is_without(scheduler))
        assert servers_of(launcher) == []
        assert await store.read(bases.all_bases) == []
        assert list((tmp_path / "bases").glob(f"*/{FILE}")) == []


async def _is_started(launcher, base_id) -> bool:
    return base_id in launcher.servers


async def _is_without(scheduler) -> bool:
    return not scheduler.bases.running()


async def test_one_that_dies_is_started_again_under_its_address_and_its_jobs_go_on(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        (base_id,) = servers_of(launcher)
        launcher.end(base_id, Ending.LOST, "killed")

        async def again() -> bool:
            return launcher.started.count(base_id) == 2 and await served(scheduler, jobs=1)()

        await until(again)
        assert launcher.servers[base_id].order.address == f"http://n1/{base_id}"

        async def is_kept() -> bool:
            (kept,) = await store.read(bases.all_bases)
            return (kept.state, kept.starts) == (BaseState.SERVING, 2)

        await until(is_kept)
        assert launcher.servers[job.job_id].stopped_with is None
    assert await states_of(store, job.job_id) == ["queued", "starting", "running"]


@pytest.mark.parametrize("error", [ConfigError("no such model"), ServerFailed("the hub is away")])
async def test_one_that_can_not_be_started_fails_the_jobs_that_wait_for_it(store, tmp_path, error, monkeypatch):
    monkeypatch.setattr("palestra_service.jobs.base_servers.AGAIN_SECONDS", 0.0)
    launcher = FakeLauncher()
    launcher.error = error
    async with schedules(store, tmp_path, launcher) as scheduler:
        jobs = [await submit(store), await submit(store)]
        for job in jobs:
            await until(in_state(store, job.job_id, JobState.FAILED))
            failed = await store.job(None, job.job_id)
            assert failed.reason == f"the base server of tiny-random could not go on: {error}"
        await until(lambda: _is_without(scheduler))
        assert await store.read(bases.all_bases) == []
        assert len(launcher.started) == (1 if isinstance(error, ConfigError) else 3)
        launcher.error = None
        again = await submit(store)  # another job tries again
        await until(in_state(store, again.job_id, JobState.RUNNING))
        assert len(scheduler.bases.running()) == 1


async def test_a_lost_machine_puts_the_jobs_of_its_base_server_back_into_the_queue(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        (first,) = servers_of(launcher)
        launcher.error = NodeLost("node n1 is gone")
        launcher.end(first, Ending.LOST, "its machine is gone")

        async def stopped() -> bool:
            return first not in {base.base_id for base in await store.read(bases.all_bases)}

        await until(stopped)
        launcher.error = None

        async def again() -> bool:
            found = await store.job(None, job.job_id)
            return found.starts == 2 and found.state is JobState.RUNNING

        await until(again)
        (second,) = servers_of(launcher)
        assert second != first
        assert (await store.job(None, job.job_id)).base_id == second


async def test_a_scheduler_finds_base_servers_of_the_one_before_with_their_jobs(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        (base_id,) = servers_of(launcher)
        key = launcher.servers[job.job_id].order.base_key.read_text()
    async with schedules(store, tmp_path, launcher) as scheduler:
        await until(served(scheduler, jobs=1))
        assert launcher.started.count(base_id) == 1
        second = await submit(store)
        await until(in_state(store, second.job_id, JobState.RUNNING))
        assert (await store.job(None, second.job_id)).base_id == base_id
        assert Admissions(tmp_path / "bases" / base_id / FILE).of(key) == job.job_id
        launcher.end(job.job_id, Ending.COMPLETED)
        launcher.end(second.job_id, Ending.COMPLETED)
        await until(served(scheduler, jobs=0))
    launcher.servers.clear()  # the machine was switched off meanwhile
    async with schedules(store, tmp_path, launcher) as scheduler:
        await scheduler.ready.wait()
        await until(lambda: _is_without(scheduler))
        assert launcher.started.count(base_id) == 1
        assert await store.read(bases.all_bases) == []


async def test_one_that_died_while_there_was_no_scheduler_is_started_again_for_its_jobs(store, tmp_path):
    launcher = FakeLauncher()
    async with schedules(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        (base_id,) = servers_of(launcher)
    del launcher.servers[base_id]
    async with schedules(store, tmp_path, launcher) as scheduler:
        await until(lambda: _is_started(launcher, base_id))  # until then the store says what was before
        await until(served(scheduler, jobs=1))
        assert launcher.servers[base_id].order.address == f"http://n1/{base_id}"


async def test_a_cancelled_job_gives_its_place_to_another(store, tmp_path):
    launcher = FakeLauncher(Node(node_id="n1", cpus=1.75, gpus=0, memory_gib=16.0))
    async with schedules(store, tmp_path, launcher) as scheduler:
        jobs = [await submit(store) for _ in range(3)]
        for job in jobs[:2]:
            await until(in_state(store, job.job_id, JobState.RUNNING))

        async def waits() -> bool:
            return "has room for its adapters (2 on each)" in scheduler.waiting.get(jobs[2].job_id, "")

        await until(waits)
        await scheduler.cancel(None, jobs[0].job_id, "not needed")
        await until(in_state(store, jobs[2].job_id, JobState.RUNNING))
        assert len(servers_of(launcher)) == 1


async def test_a_tenant_with_its_quota_of_adapters_is_told_what_frees_one(store):
    await store.write(lambda c: accounts.add_tenant(c, "a", 0.0))
    await store.write(lambda c: decisions.change_quota(c, "a", {"adapters": 2}))
    first = await submit(store)
    await submit(store)
    with pytest.raises(TooManyRequests, match=r"2.*2.*frees"):
        await submit(store)
    await submit(store, "b", "ben")
    await store.request_cancel(None, first.job_id, "over")
    await submit(store)
    assert await store.read(lambda c: decisions.quota_of(c, "a")) == Quota(adapters=2)


async def test_a_tenant_sees_the_base_servers_of_its_jobs_and_the_operator_all(store, tmp_path):
    async with schedules(store, tmp_path, FakeLauncher()) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        plane = SimpleNamespace(scheduler=scheduler, store=store)
        seen = {name: _bases(plane, identity(tenant=name)) for name in ("default", "a", "b")}
    assert [(view.model, view.jobs, view.own_jobs) for view in seen["default"]] == [("tiny-random", 1, 0)]
    assert [(view.jobs, view.own_jobs, view.adapters) for view in seen["a"]] == [(1, 1, 1)]
    assert seen["b"] == []


async def test_a_job_that_could_never_start_beside_a_base_server_or_under_its_quota_is_refused(store, tmp_path):
    await store.write(lambda c: accounts.add_tenant(c, "a", 0.0))
    await store.write(lambda c: decisions.change_quota(c, "a", {"gpus": 0.25}))
    whole = replace(LIMITS, resources=Resources(cpus=4.0, gpus=1.0))
    async with schedules(store, tmp_path, FakeLauncher(), whole) as scheduler:
        await until(lambda: _knows_nodes(scheduler))
        assert await scheduler.refusal(LIGHT, "b", 0) is None
        said = await scheduler.refusal(LIGHT, "b", 1)
        assert said.startswith("needs 0.25 CPU beside its base server, which holds 1 GPU and 4 CPUs; no node has room")
        quota = await scheduler.refusal(LIGHT, "a", 1)  # half of the places, and so half of the GPU
        assert quota.startswith("needs 0.5 GPU; the quota of tenant a is 0.25 (with its part of a base server: 0.5 GPU")
    async with schedules(store, tmp_path, FakeLauncher()) as scheduler:
        await until(lambda: _knows_nodes(scheduler))
        assert await scheduler.refusal(LIGHT, "a", 1) is None


async def _knows_nodes(scheduler) -> bool:
    return bool(scheduler.nodes)


async def test_what_a_tenant_uses_has_its_parts_of_base_servers(store, tmp_path):
    async with schedules(store, tmp_path, FakeLauncher()) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        used = _in_use(scheduler.running.values())
    assert (used.jobs, used.cpus, used.gpus) == (1, 0.75, 0.0)  # its own 0.25, and one of two places on 1 CPU


async def test_why_base_servers_went_is_kept_for_a_bounded_number_of_jobs(store, tmp_path, monkeypatch):
    """Jobs that are cancelled at the same moment never ask."""
    monkeypatch.setattr("palestra_service.jobs.base_servers.MOST_FAILED", 3)
    async with schedules(store, tmp_path, FakeLauncher()) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        servers = scheduler.bases
        monkeypatch.setattr(servers, "_stop_job", lambda job_id: None)
        (base,) = servers._bases.values()
        for number in range(10):
            base.admitted.add(replace(job, job_id=f"job-{number}"))
        servers._give_up(base, "it died")
        base.admitted.add(replace(job, job_id="job-last"))
        servers._give_up(base, "it died")
        assert len(servers._failed_jobs) == 3
        assert "job-last" in servers._failed_jobs
        for number in range(10):
            base.admitted.remove(f"job-{number}")
        base.admitted.remove("job-last")
