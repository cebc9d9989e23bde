"""Runners that die: what they held is played again, also what they get after their death, and others replace them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from palestra.errors import StoreError
from palestra.runtime import runner_fleet
from palestra.runtime.runner_fleet import RunnerDied, RunnerFleet, RunnerOrder
from palestra.server.workers import WorkerRegistry
from palestra.types.progress import JobProgress
from palestra.types.records import Task
from unit.building import FakeClock, open_store

ORDER = RunnerOrder(url="http://job", key=lambda: "key", concurrency=1)


@pytest.fixture
def plane(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_fleet, "SWEEP_SECONDS", 0.01)
    with open_store(tmp_path) as store:
        progress = JobProgress(job="run", steps=1, run_dir="run")
        yield SimpleNamespace(store=store, progress=progress, workers=WorkerRegistry(FakeClock()))


class Starter:
    """Starts runners of which the first one dies; the others play until they are cancelled."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.replaced = asyncio.Event()

    async def __call__(self, order: RunnerOrder, name: str) -> None:
        self.names.append(name)
        if len(self.names) == 1:
            raise RunnerDied("was killed by SIGKILL")
        self.replaced.set()
        await asyncio.Event().wait()


async def claimed(plane, worker: str) -> str:
    episode = await plane.store.episodes.claim(worker, f"request of {worker}", None)
    assert episode is not None
    plane.workers.mark_playing(worker, episode.episode_id, episode.fence)
    return episode.episode_id


async def given_back(plane, name: str) -> None:
    while (await plane.store.episodes.get(name)).state != "registered":
        await asyncio.sleep(0.01)


async def test_an_episode_that_a_runner_gets_after_its_death_is_given_back_and_the_runner_is_forgotten(plane):
    await plane.store.groups.register("train", 0, 0, Task(task_id="t", data={}), 2)
    start = Starter()
    async with asyncio.timeout(10), RunnerFleet(1, ORDER, start, plane):
        await start.replaced.wait()
        living = await claimed(plane, start.names[1])
        late = await claimed(plane, start.names[0])
        await given_back(plane, late)
        assert (await plane.store.episodes.get(living)).state == "claimed"
        assert len(plane.workers) == 1
        assert (await plane.store.episodes.get(late)).attempts == 0
    assert (await plane.store.episodes.get(living)).state == "registered"
    assert plane.workers.all_notified


async def test_what_runners_of_before_held_is_given_back_and_what_other_workers_hold_is_not(plane):
    await plane.store.groups.register("train", 0, 0, Task(task_id="t", data={}), 2)
    before, other = await claimed(plane, "runner-0-0123ab"), await claimed(plane, "runner-0")
    async with RunnerFleet(1, ORDER, Starter(), plane):
        assert (await plane.store.episodes.get(before)).state == "registered"
        assert (await plane.store.episodes.get(other)).state == "claimed"


async def test_a_runner_is_replaced_while_the_disk_is_full(plane, monkeypatch, caplog):
    async def full(*_: object) -> None:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(plane.store.log, "add_event", full)
    start = Starter()
    async with asyncio.timeout(10), RunnerFleet(1, ORDER, start, plane):
        await start.replaced.wait()
    assert "runner 0 was killed by SIGKILL can't be recorded now: database or disk is full" in caplog.text


async def test_episodes_that_can_not_be_given_back_are_said_once_and_tried_again(plane, monkeypatch, caplog):
    await plane.store.groups.register("train", 0, 0, Task(task_id="t", data={}), 1)
    start, really, tries = Starter(), plane.store.episodes.abort, 0

    async def abort(*given: object, **more: object) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise StoreError("database or disk is full")
        await really(*given, **more)

    monkeypatch.setattr(plane.store.episodes, "abort", abort)
    async with asyncio.timeout(10), RunnerFleet(1, ORDER, start, plane):
        await start.replaced.wait()
        await given_back(plane, await claimed(plane, start.names[0]))
    assert tries == 4
    assert caplog.text.count("can't be given back now: database or disk is full") == 1
