"""An environment that does not close holds nobody up for long, and still closes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from palestra.envs import ConcurrentEnvironment, TaskEnvironment
from palestra.envs import concurrent as closing
from palestra.envs.concurrent import close_or_log
from palestra.rollout.orchestrator import EnvironmentPool
from palestra.types.clock import SystemClock

log = logging.getLogger("palestra.rollout")


class Slow(ConcurrentEnvironment):
    """Closes when it is released."""

    reusable = True

    def __init__(self) -> None:
        super().__init__()
        self.release, self.closed = asyncio.Event(), False

    async def start(self, task):
        """Never called."""

    async def on_action(self, observation, action):
        """Never called."""

    async def close(self):
        await self.release.wait()
        self.closed = True


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(closing, "WAIT_SECONDS", 0.05)


async def test_the_caller_goes_on_and_the_environment_closes_later():
    environment = Slow()
    await asyncio.wait_for(close_or_log(environment, 10, log), 5)
    assert not environment.closed
    environment.release.set()
    await asyncio.sleep(0.01)
    assert environment.closed
    assert not closing._closing


async def test_a_cancelled_caller_stops_waiting_and_the_environment_still_closes(monkeypatch):
    monkeypatch.setattr(closing, "WAIT_SECONDS", 60)
    environment = Slow()
    caller = asyncio.create_task(close_or_log(environment, 10, log))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait((caller,), timeout=5)
    assert caller.cancelled()
    environment.release.set()
    await asyncio.sleep(0.01)
    assert environment.closed


async def test_the_limit_of_the_closing_is_kept_and_logged(caplog):
    environment = Slow()
    await close_or_log(environment, 0.1, log)
    await asyncio.sleep(0.3)
    assert "closing a Slow failed: TimeoutError" in caplog.text
    assert not closing._closing


async def test_a_pool_closes_all_that_it_keeps_at_the_same_time(monkeypatch):
    made = []

    def make() -> Slow:
        made.append(Slow())
        return made[-1]

    pool = EnvironmentPool(make, system=None, clock=SystemClock())
    pool.keep()
    async with pool.acquire(), pool.acquire(), pool.acquire():
        pass
    monkeypatch.setattr(closing, "WAIT_SECONDS", 1.0)
    began = time.monotonic()
    await pool.close()
    assert time.monotonic() - began < 2
    for one in made:
        one.release.set()
    await asyncio.sleep(0.01)
    assert len(made) == 3
    assert all(one.closed for one in made)


class Noted(TaskEnvironment):
    """Notes in which thread it is set up and closed."""

    def __init__(self) -> None:
        super().__init__(lambda task, answer: 1.0)
        self.threads: list[int] = []

    def setup(self) -> None:
        self.threads.append(threading.get_ident())

    def close(self) -> None:
        self.threads.append(threading.get_ident())


async def test_only_an_environment_that_has_something_to_do_gets_a_thread_for_its_setup_and_its_end(monkeypatch):
    started = list[str]()
    really = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread.name)
        really(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    noted = Noted()
    for made, threads in ((TaskEnvironment(lambda task, answer: 1.0), 0), (noted, 2)):
        started.clear()
        pool = EnvironmentPool(lambda made=made: made, system=None, clock=SystemClock())
        async with pool.acquire():
            pass
        assert len(started) == threads
    assert len(noted.threads) == 2
    assert threading.get_ident() not in noted.threads
