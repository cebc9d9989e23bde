"""Two control planes on one store: the first is cut off at every point, and wakes up beside its successor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from palestra.errors import StoreError, Superseded
from palestra.types.states import JobState
from palestra_service.jobs import scheduler as scheduler_module
from palestra_service.jobs.launcher import Ending, Listening
from palestra_service.jobs.scheduler import JobScheduler
from palestra_service.placement.placement import PlacementPolicy
from palestra_service.store import backends
from palestra_service.store.control_store import ControlStore
from palestra_service.store.tables import EPOCH_KEY, meta
from unit.building import FakeClock
from unit.control.building import cut_sessions, submit
from unit.control.launching import FakeLauncher, Server
from unit.control.scheduling import in_state
from unit.waiting import until

pytestmark = pytest.mark.ci

POINTS = 12  # more than there are until the former waits for its job to listen


class Cluster(FakeLauncher):
    """What one control plane sees of the cluster of both. As in Ray, `find` clears a server that does not listen."""

    def __init__(self, servers, ended) -> None:
        super().__init__(quick=False)
        self.servers, self.ended_by_hand = servers, ended

    async def start(self, order) -> Listening:
        self.started.append(order.job_id)
        server = self.servers[order.job_id] = Server(order)
        await server.listening.wait()  # one that is broken off is left, as by a process that is superseded
        return self._listening(order.job_id)

    async def find(self, job_id: str) -> Listening | None:
        if job_id in self.servers and not self.servers[job_id].listening.is_set():
            await self.stop(job_id, 0.0)
        return await super().find(job_id)

    async def stop(self, job_id: str, grace_seconds: float) -> None:
        self.ended_by_hand.append((self, job_id))
        self.servers.pop(job_id, None)


def lose_lock(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///") + ".lock").unlink()
    else:
        cut_sessions(url)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(backends, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 0.01)


async def successor_runs(url: str, folder: Path, cluster: Cluster, go_on: asyncio.Event, clock) -> list[str]:
    """Take over, submit a job, let the former go on while the job starts, and return the state of every job."""
    lose_lock(url)
    with ControlStore(url, clock) as store:
        scheduler = JobScheduler(store, cluster, folder, PlacementPolicy())
        running = asyncio.ensure_future(scheduler.run())
        job = await submit(store, restarts_limit=0)
        await until(in_state(store, job.job_id, JobState.STARTING))

        async def starts() -> bool:
            return job.job_id in cluster.servers

        await until(starts)
        go_on.set()
        await asyncio.sleep(0.3)
        jobs = [job.job_id, *(other.job_id for other in (*await store.live(), *await store.queue()))]
        for job_id in dict.fromkeys(jobs):

            async def listens(job_id=job_id) -> bool:
                if job_id in cluster.servers:
                    cluster.servers[job_id].listening.set()
                return (await store.job(None, job_id)).state is JobState.RUNNING

            await until(listens)
            cluster.end(job_id, Ending.COMPLETED)
            await until(in_state(store, job_id, JobState.COMPLETED))
        assert (await store.job(None, job.job_id)).starts == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [change.following.value for change in await store.changes(None, job.job_id)]


@pytest.mark.parametrize("point", range(1, POINTS))
async def test_the_jobs_of_a_successor_run_and_its_former_ends(url, tmp_path, point):
    """The former is stopped before the n-th of its writes and calls of the launcher."""
    clock, servers, ended = FakeClock(), {}, []
    former, successor = Cluster(servers, ended), Cluster(servers, ended)
    reached, go_on, passes = asyncio.Event(), asyncio.Event(), 0

    async def pass_point() -> None:
        nonlocal passes
        passes += 1
        if passes >= point:
            reached.set()
            await go_on.wait()

    def stopping(method):
        async def run(*arguments, **named):
            await pass_point()
            return await method(*arguments, **named)

        return run

    with ControlStore(url, clock) as store:
        await submit(store)
        store._db.write = stopping(store._db.write)
        for name in ("nodes", "start", "find", "known", "stop"):
            setattr(former, name, stopping(getattr(former, name)))
        running = asyncio.ensure_future(JobScheduler(store, former, tmp_path, PlacementPolicy()).run())
        await asyncio.wait_for(reached.wait(), 20)
        assert await successor_runs(url, tmp_path, successor, go_on, clock) == [
            "queued",
            "starting",
            "running",
            "completed",
        ]
        with pytest.raises(Superseded):
            await asyncio.wait_for(running, 20)
        by_former = [job_id for launcher, job_id in ended if launcher is former]
        assert by_former == []
        with pytest.raises(Superseded):  # also when the successor has gone
            await submit(store)


async def test_a_transaction_compares_the_epoch(store):
    """A pooler that shares sessions breaks the lock, and not this."""
    await submit(store)
    await store.write(lambda c: c.execute(sa.update(meta).where(meta.c.key == EPOCH_KEY).values(value="1000")))
    for _ in range(2):
        with pytest.raises(Superseded) as caught:
            await submit(store)
    assert (caught.value.http_status, caught.value.retryable, caught.value.exit_code) == (503, True, 3)
    assert isinstance(caught.value, StoreError)
    assert len(await store.queue()) == 1
