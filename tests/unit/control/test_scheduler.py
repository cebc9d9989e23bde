"""The scheduler on a launcher of nothing: every way in which a job can begin and end."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from palestra.config import SAVED_CONFIG, JobConfig, load_config
from palestra.errors import ConfigError, ServerFailed
from palestra.store.browsing import browse, list_episodes
from palestra.store.lifecycle import EpisodeEnd
from palestra.trainer import checkpoint
from palestra.types.states import JobState
from palestra_control.jobs import SHARES, Resources
from palestra_service.jobs.launcher import LOG_FILE, Ended, Ending, write_ended
from palestra_service.jobs.rules import Rules
from palestra_service.placement.fitting import GpuShare, Node
from palestra_service.store import accounts, decisions
from unit.building import TASK, open_store
from unit.control.launching import FakeLauncher
from unit.control.recording import play
from unit.control.scheduling import in_state, is_empty, is_true, scheduling, states_of, submit
from unit.waiting import until

pytestmark = pytest.mark.ci

WHOLE = Resources(cpus=1.0, gpus=2.0)


@pytest.fixture
def store(sqlite_store):
    return sqlite_store


async def test_a_job_starts_runs_and_completes_with_its_log(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        order = launcher.servers[job.job_id].order
        assert (order.folder, order.node, order.config) == (tmp_path / "jobs" / job.job_id, "n1", {"steps": 3})
        running = await store.job("a", job.job_id)
        assert running.url == f"http://n1/{job.job_id}"
        assert list(scheduler.running) == [job.job_id]
        order.folder.mkdir(parents=True)
        (order.folder / LOG_FILE).write_text("x" * 5000 + "\nstep 3/3\n")
        launcher.end(job.job_id, Ending.COMPLETED)
        await until(in_state(store, job.job_id, JobState.COMPLETED))
        over = await store.job("a", job.job_id)
        assert (over.url, over.reason, over.log_tail) == (None, "its steps are done", "step 3/3\n")
        await until(lambda: is_empty(scheduler.running))
    assert await states_of(store, job.job_id) == ["queued", "starting", "running", "completed"]


async def test_a_start_that_fails_for_good_is_a_failure_with_the_reason(store, tmp_path):
    launcher = FakeLauncher()
    launcher.error = ConfigError("max_context is too large")
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store)
        await until(in_state(store, job.job_id, JobState.FAILED))
    assert (await store.job("a", job.job_id)).reason == "max_context is too large"
    assert launcher.started == [job.job_id]


async def test_a_start_that_may_succeed_later_is_tried_again_up_to_the_limit(store, tmp_path):
    launcher = FakeLauncher()
    launcher.error = ServerFailed("the machine did not answer")
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, restarts_limit=2)
        await until(in_state(store, job.job_id, JobState.FAILED))
    over = await store.job("a", job.job_id)
    assert over.reason == "lost 3 times, at last: the machine did not answer"
    assert (over.starts, over.restarts_left) == (3, 0)


async def test_a_lost_server_goes_back_to_the_queue_and_keeps_its_place(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, resources=WHOLE)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        later = await submit(store, resources=WHOLE)
        launcher.end(job.job_id, Ending.LOST, "its machine is gone")
        await until(lambda: is_true(launcher.started == [job.job_id] * 2))
        assert (await store.job("a", later.job_id)).state is JobState.QUEUED
    changes = await store.changes("a", job.job_id)
    assert "its machine is gone; it goes on from its last checkpoint" in [change.reason for change in changes]


async def test_a_model_that_is_served_is_served_again_when_its_server_is_lost(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store, kind="inference", config={"kind": "inference"}, restarts_limit=1)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(lambda: is_true(launcher.started == [job.job_id] * 2))
        await until(in_state(store, job.job_id, JobState.RUNNING))
        await scheduler.cancel("a", job.job_id, "enough")
        await until(in_state(store, job.job_id, JobState.CANCELLED))
    reasons = [change.reason for change in await store.changes("a", job.job_id)]
    assert "its process is gone; it is started again" in reasons


async def test_a_job_that_starts_from_another_has_the_weights_in_a_folder_of_its_own(store, tmp_path):
    launcher = FakeLauncher()
    config = {"policies": {"p": {"model": "tiny-random", "max_context": 99}}}
    checkpoints = tmp_path / "jobs" / "job-of-before" / "run" / "checkpoints"
    for step in (1, 2):
        checkpoint.write(checkpoints, step, lambda path: (path / "w").write_text("w"), {"step": step}, keep=9)
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, config=config, from_job="job-of-before", from_step=1)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        own = tmp_path / "jobs" / job.job_id / "job-of-before-step-1"
        order = launcher.servers[job.job_id].order
        assert order.config == {"policies": {"p": {"model": str(own), "max_context": 99}}}
        assert (await store.job("a", job.job_id)).config == config, "no path of the server is shown"
        assert (own / "w").read_text() == "w"
        shutil.rmtree(checkpoints)
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(lambda: is_true(launcher.started == [job.job_id] * 2))
        await until(in_state(store, job.job_id, JobState.RUNNING))


async def test_of_several_policies_the_one_that_is_not_frozen_starts_from_the_checkpoint(store, tmp_path):
    launcher = FakeLauncher()
    config = {"policies": {"old": {"model": "house", "frozen": True}, "new": {"model": "tiny-random"}}}
    checkpoints = tmp_path / "jobs" / "job-of-before" / "run" / "checkpoints"
    checkpoint.write(checkpoints, 1, lambda path: (path / "w").write_text("w"), {"step": 1}, keep=9)
    async with scheduling(store, tmp_path, launcher, rules=Rules(models={"house": "/srv/house"})):
        job = await submit(store, config=config, from_job="job-of-before", from_step=1)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        order = launcher.servers[job.job_id].order
        own = tmp_path / "jobs" / job.job_id / "job-of-before-step-1"
        assert {name: policy["model"] for name, policy in order.config["policies"].items()} == {
            "old": "house",
            "new": str(own),
        }
        assert order.weights == {"old": "/srv/house"}


async def test_each_of_several_policies_has_the_weights_of_its_name(store, tmp_path):
    launcher = FakeLauncher()
    roles = {"a": "white", "b": "black", "c": "old"}
    config = {"policies": {"old": {"frozen": True, "model": "tiny-random"}, "white": {}, "black": {}}, "roles": roles}
    checkpoints = tmp_path / "jobs" / "job-of-before" / "run" / "checkpoints"
    for name in ("white", "black"):
        fill = lambda path, name=name: (path / "w").write_text(name)  # noqa: E731
        checkpoint.write(checkpoints / name, 3, fill, {"step": 3}, keep=9)
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, config=config, from_job="job-of-before", from_step=3)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        policies = launcher.servers[job.job_id].order.config["policies"]
        assert policies["old"] == config["policies"]["old"]
        for name in ("white", "black"):
            assert (Path(policies[name]["model"]) / "w").read_text() == name


async def test_a_job_whose_checkpoint_went_while_it_waited_fails_and_says_so(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, config={"policies": {"p": {}}}, from_job="job-of-before", from_step=1)
        await until(in_state(store, job.job_id, JobState.FAILED))
    assert (await store.job("a", job.job_id)).reason == "the checkpoint of step 1 is gone; start from a newer one"
    assert launcher.started == []


async def test_a_job_that_learns_from_another_has_the_episodes_of_its_submission_in_a_folder_of_its_own(
    store, tmp_path
):
    launcher, source = FakeLauncher(), "job-0123456789abcdef"
    run = tmp_path / "jobs" / source / "run"
    await play(run, store.clock, 1.0, 0.0, config=JobConfig(model="house"))
    config = {"policies": {"p": {"model": "tiny-random"}}, "algorithm": {"name": "sft", "from_run": source}}
    job = await submit(store, config=config)
    store.clock.advance(1)
    with open_store(run, store.clock) as runs:  # the other job goes on
        await runs.groups.register("train", 1, 2, TASK, 1)
        late = await runs.episodes.claim("w", "late", None)
        await runs.episodes.end(late.episode_id, late.fence, EpisodeEnd(rewards={"agent": 5.0}))
    own = tmp_path / "jobs" / job.job_id / f"{source}-episodes"
    (own.parent / f".{own.name}").mkdir(parents=True)  # of a start that was killed
    async with scheduling(store, tmp_path, launcher, rules=Rules(models={"house": "/srv/house"})):
        await until(in_state(store, job.job_id, JobState.RUNNING))
        order = launcher.servers[job.job_id].order
        assert order.config == config | {"algorithm": {"name": "sft", "from_run": str(own)}}
        assert (await store.job("a", job.job_id)).config == config, "no path of the server is shown"
        shutil.rmtree(run)
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(lambda: is_true(launcher.started == [job.job_id] * 2))
        await until(in_state(store, job.job_id, JobState.RUNNING))
    with browse(own / "run.db") as connection:
        found = list_episodes(connection, None, None, 10**6)
        assert [(each.kind, each.reward, each.tokens) for each in found] == [
            ("train", 1.0, 3),
            ("train", 0.0, 3),
        ]
    assert load_config(own / SAVED_CONFIG).policies["policy"].model == "/srv/house"
    assert sorted(path.name for path in own.iterdir()) == [SAVED_CONFIG, "run.db"]


async def test_a_job_whose_source_went_while_it_waited_fails_and_says_so(store, tmp_path):
    config = {"algorithm": {"name": "sft", "from_run": "job-0123456789abcdef"}}
    async with scheduling(store, tmp_path, FakeLauncher()):
        job = await submit(store, config=config)
        await until(in_state(store, job.job_id, JobState.FAILED))
    assert "job-0123456789abcdef" in (await store.job("a", job.job_id)).reason


async def test_cancelling_a_running_job_stops_its_server_and_frees_what_it_held(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher, stop_seconds=7.0) as scheduler:
        first, second = await submit(store, resources=WHOLE), await submit(store, resources=WHOLE)
        await until(in_state(store, first.job_id, JobState.RUNNING))
        server = launcher.servers[first.job_id]
        await scheduler.cancel("a", first.job_id, "enough")
        await until(in_state(store, first.job_id, JobState.CANCELLED))
        assert server.stopped_with == 7.0
        await until(in_state(store, second.job_id, JobState.RUNNING))


async def test_the_devices_that_the_cluster_chose_are_those_that_are_counted(store, tmp_path):
    launcher = FakeLauncher()
    part = Resources(cpus=1.0, gpus=0.5)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        launcher.quick = False
        jobs = [(await submit(store, resources=part)).job_id for _ in range(2)]
        await until(lambda: is_true(launcher.servers.keys() == {*jobs}))  # a moment after they are STARTING
        launcher.given = {jobs[0]: (1,), jobs[1]: (7,)}  # and one that is counted in another way
        for job in jobs:
            launcher.servers[job].listening.set()
            await until(in_state(store, job, JobState.RUNNING))
        held = {job: scheduler.running[job].devices for job in jobs}
        assert held == {jobs[0]: (GpuShare(1, SHARES // 2),), jobs[1]: (GpuShare(0, SHARES // 2),)}
        whole = await submit(store, resources=Resources(cpus=1.0, gpus=1.0))
        await until(lambda: asyncio.sleep(0, whole.job_id in scheduler.waiting))


async def test_cancelling_while_it_starts_leaves_nothing(store, tmp_path):
    launcher = FakeLauncher(quick=False)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(lambda: is_true(job.job_id in launcher.servers))
        await scheduler.cancel("a", job.job_id, "enough")
        await until(in_state(store, job.job_id, JobState.CANCELLED))
        await until(lambda: is_empty(scheduler.running))
        assert launcher.servers == {}


async def test_cancelling_a_job_that_waits_is_at_once(store, tmp_path):
    await store.write(lambda c: decisions.set_draining(c, True))
    async with scheduling(store, tmp_path, FakeLauncher()) as scheduler:
        job = await submit(store)
        view = await scheduler.cancel("a", job.job_id, "enough")
        assert view.state is JobState.CANCELLED


async def test_no_more_start_at_once_than_allowed(store, tmp_path):
    launcher = FakeLauncher(quick=False)
    async with scheduling(store, tmp_path, launcher) as scheduler:
        jobs = [await submit(store, resources=Resources(cpus=0.5)) for _ in range(5)]
        await until(lambda: is_true(len(launcher.servers) == 2))
        await asyncio.sleep(0.05)
        assert len(launcher.servers) == 2
        assert "starts" in scheduler.waiting[jobs[-1].job_id]
        launcher.quick = True
        for server in list(launcher.servers.values()):
            server.listening.set()
        for job in jobs:
            await until(in_state(store, job.job_id, JobState.RUNNING))


async def test_an_attached_job_is_cancelled_when_its_client_is_gone_for_long(store, tmp_path):
    launcher, clock = FakeLauncher(), store.clock
    async with scheduling(store, tmp_path, launcher, absent_seconds=60.0) as scheduler:
        attached, detached = await submit(store, attached=True), await submit(store)
        for job in (attached, detached):
            await until(in_state(store, job.job_id, JobState.RUNNING))
        clock.advance(59)
        scheduler.seen(attached.job_id)
        clock.advance(59)
        store.changed.notify()  # so that it looks
        await asyncio.sleep(0.05)
        assert (await store.job("a", attached.job_id)).state is JobState.RUNNING
        clock.advance(2)
        store.changed.notify()
        await until(in_state(store, attached.job_id, JobState.CANCELLED))
        assert (await store.job("a", detached.job_id)).state is JobState.RUNNING
    assert launcher.servers.keys() == {detached.job_id}


async def test_a_machine_that_comes_later_wakes_what_waits_for_it(store, tmp_path):
    launcher = FakeLauncher(Node(node_id="small", cpus=1.0, gpus=0, memory_gib=4.0))
    async with scheduling(store, tmp_path, launcher) as scheduler:
        assert "largest node" in (await scheduler.refusal(WHOLE, "a") or "largest node")
        job = await submit(store, resources=WHOLE)
        await until(lambda: is_true(job.job_id in scheduler.waiting))
        assert "GPU" in scheduler.waiting[job.job_id]
        launcher.machines.append(Node(node_id="large", cpus=8.0, gpus=4, memory_gib=64.0))
        store.changed.notify()
        await until(in_state(store, job.job_id, JobState.RUNNING))
        assert launcher.servers[job.job_id].order.node == "large"


async def test_a_quota_is_told_when_a_job_is_submitted_and_kept_when_it_waits(store, tmp_path):
    await store.write(lambda c: accounts.add_tenant(c, "a", 0.0))
    await store.write(lambda c: decisions.change_quota(c, "a", {"jobs": 1, "gpus": 1.0}))
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher) as scheduler:
        await until(lambda: is_true(bool(scheduler.nodes)))
        assert await scheduler.refusal(WHOLE, "a") is not None
        assert await scheduler.refusal(WHOLE, "b") is None
        first, second = await submit(store), await submit(store)
        other = await submit(store, tenant="b")
        await until(in_state(store, other.job_id, JobState.RUNNING))
        assert (await store.job("a", second.job_id)).state is JobState.QUEUED
        launcher.end(first.job_id, Ending.COMPLETED)
        await until(in_state(store, second.job_id, JobState.RUNNING))


@pytest.mark.parametrize("following", [JobState.STARTING, JobState.RUNNING, JobState.QUEUED, JobState.FAILED])
async def test_a_job_that_is_cancelled_twice_while_a_change_is_written_ends_once(
    store, tmp_path, following, monkeypatch
):
    launcher, change, held, go_on = FakeLauncher(), store.change_state, asyncio.Event(), asyncio.Event()

    async def slow(job_id, expected, state, *arguments, **fields):
        if state is not following or held.is_set():
            return await change(job_id, expected, state, *arguments, **fields)
        if following in (JobState.QUEUED, JobState.FAILED):  # not yet committed; else committed, and not yet answered
            held.set()
            await go_on.wait()
        job = await change(job_id, expected, state, *arguments, **fields)
        held.set()
        await go_on.wait()
        return job

    monkeypatch.setattr(store, "change_state", slow)
    if following in (JobState.QUEUED, JobState.FAILED):
        launcher.error = (ServerFailed if following is JobState.QUEUED else ConfigError)("no")
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await held.wait()
        for _ in range(2):
            await scheduler.cancel("a", job.job_id, "enough")
        await asyncio.sleep(0.02)
        go_on.set()
        over = JobState.FAILED if following is JobState.FAILED else JobState.CANCELLED
        await until(in_state(store, job.job_id, over))
        await until(lambda: is_empty(scheduler.running))
        assert launcher.servers == {}
    if following is not JobState.FAILED:
        assert (await store.job("a", job.job_id)).reason.startswith("enough")


async def test_cancelling_a_start_once_more_does_not_disturb_what_clears_up(store, tmp_path):
    launcher, clears = FakeLauncher(quick=False), asyncio.Event()
    start = launcher.start

    async def slow_to_clear(order):
        try:
            return await start(order)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            clears.set()
            raise

    launcher.start = slow_to_clear
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        await until(lambda: is_true(job.job_id in launcher.servers))
        for _ in range(3):
            await scheduler.cancel("a", job.job_id, "enough")
        await until(in_state(store, job.job_id, JobState.CANCELLED))
        assert clears.is_set()


async def test_no_node_is_kept_for_the_end_of_a_model_that_is_served(store, tmp_path):
    """Served jobs are endless: the large job waits for the node of the training, the small one starts at once."""
    launcher = FakeLauncher(*(Node(node_id=name, cpus=4.0, gpus=0, memory_gib=4.0) for name in "ab"))
    async with scheduling(store, tmp_path, launcher):
        served = await submit(store, kind="inference", resources=Resources(cpus=3.0))
        await until(in_state(store, served.job_id, JobState.RUNNING))
        trains = await submit(store, resources=Resources(cpus=4.0))
        await until(in_state(store, trains.job_id, JobState.RUNNING))
        large = await submit(store, resources=Resources(cpus=4.0))
        small = await submit(store, resources=Resources(cpus=1.0))
        await until(in_state(store, small.job_id, JobState.RUNNING))
        assert (await store.job(None, small.job_id)).node == (await store.job(None, served.job_id)).node
        assert (await store.job(None, large.job_id)).state is JobState.QUEUED


async def test_what_a_dying_server_left_of_its_end_counts_and_that_of_an_earlier_one_does_not(store, tmp_path):
    launcher = FakeLauncher()
    async with scheduling(store, tmp_path, launcher) as scheduler:
        job = await submit(store)
        folder = scheduler.folder_of(job.job_id)
        await until(in_state(store, job.job_id, JobState.RUNNING))
        folder.mkdir(parents=True, exist_ok=True)
        write_ended(folder, Ended(ending=Ending.LOST, reason="of the first server"))
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(starts(store, job.job_id, 2))
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(starts(store, job.job_id, 3))
        write_ended(folder, Ended(ending=Ending.FAILED, reason="out of memory"))
        launcher.end(job.job_id, Ending.LOST, "its process is gone")
        await until(in_state(store, job.job_id, JobState.FAILED))
        reasons = [change.reason for change in await store.changes(None, job.job_id)]
        assert [reason.partition(";")[0] for reason in reasons if "server" in reason or "gone" in reason] == [
            "of the first server",
            "its process is gone",
        ]
        assert reasons[-1] == "out of memory"


@pytest.mark.parametrize(
    ("asked", "limit"),
    [({"memory_gib": 3.0}, 3.0), ({"cpus": 2.0}, 8.0), ({"cpus": 0.5}, 4.0), ({"cpus": 1.0, "gpus": 1.0}, 8.0)],
)
async def test_a_job_may_use_what_it_asked_for_or_its_share_of_the_node(store, tmp_path, asked, limit):
    launcher = FakeLauncher(Node(node_id="n", cpus=4.0, gpus=2, memory_gib=16.0))
    async with scheduling(store, tmp_path, launcher):
        job = await submit(store, resources=Resources(**asked))
        await until(in_state(store, job.job_id, JobState.RUNNING))
        assert launcher.servers[job.job_id].order.memory_gib == limit


def starts(store, job_id: str, number: int):
    async def ready() -> bool:
        job = await store.job(None, job_id)
        return job.starts == number and job.state is JobState.RUNNING

    return ready
