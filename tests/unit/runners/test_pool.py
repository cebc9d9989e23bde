"""The job's own runners: they play whatever there is, until they are stopped."""

from __future__ import annotations

import asyncio

import pytest

from palestra.envs import Environment
from palestra.errors import EnvironmentFailed, RolloutFailed
from palestra.rollout import RolloutSpec
from palestra.runners import Runner, RunnerPool
from palestra.session import Sessions
from unit.building import TASK
from unit.waiting import until


class Once(Environment):
    """One step. Counts how many are played at once."""

    blocking = False
    now = most = 0

    def reset(self, task):
        type(self).now += 1
        type(self).most = max(self.now, self.most)
        return "?", {}

    def step(self, action):
        type(self).now -= 1
        return "", 1.0, True, False, {}


def pool(bench, environment=Once, max_concurrency=4, **kw) -> RunnerPool:
    sessions = Sessions(bench.context, 10)
    runner = Runner(sessions, RolloutSpec(environment=environment))
    return RunnerPool(sessions, runner, max_concurrency=max_concurrency, **kw)


async def stopped(task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_everything_that_comes_is_played_by_no_more_than_allowed(bench):
    class Counted(Once):
        now = most = 0

    made = pool(bench, Counted)
    playing = asyncio.ensure_future(made.run())
    for group in range(1, 6):
        await bench.store.groups.register("train", group, 1, TASK, 7)
        await asyncio.sleep(0.005)
    await bench.store.groups.register("validation", 0, 1, TASK, 2)
    await until(lambda: done(bench, 1 + 35 + 2))
    assert Counted.most <= 4
    await until(lambda: counted(made, {"done": 38}))
    await stopped(playing)
    assert made.progress.playing == 0


async def counted(made: RunnerPool, terminations: dict[str, int]) -> bool:
    return made.progress.terminations == terminations


async def done(bench, number: int) -> bool:
    return (await bench.store.episodes.counts()).completed == number


async def test_what_is_played_when_it_is_stopped_is_given_back_at_once(bench):
    await bench.store.groups.register("train", 1, 1, TASK, 10)
    await bench.engine.pause()
    made = pool(bench)
    playing = asyncio.ensure_future(made.run())
    await until(lambda: claimed(bench, 4))
    await stopped(playing)
    counts = await bench.store.episodes.counts()
    assert (counts.claimed, counts.registered) == (0, 11)


async def claimed(bench, number: int) -> bool:
    return (await bench.store.episodes.counts()).claimed == number


async def test_an_environment_that_only_fails_ends_the_job_with_the_reason(bench):
    class Broken(Once):
        def step(self, action):
            raise ConnectionError("no network")

    for group in range(1, 9):
        await bench.store.groups.register("train", group, 1, TASK, 8)
    with pytest.raises(RolloutFailed, match=r"20.*network"):
        await asyncio.wait_for(pool(bench, Broken).run(), 10)
    assert (await bench.store.episodes.counts()).claimed == 0


async def test_one_that_fails_now_and_then_is_played_again(bench):
    class Flaky(Once):
        tries = 0

        def step(self, action):
            type(self).tries += 1
            if self.tries % 2:
                raise EnvironmentFailed("no network")
            return super().step(action)

    made = pool(bench, Flaky, max_concurrency=1)
    await bench.store.groups.register("train", 1, 1, TASK, 3)
    playing = asyncio.ensure_future(made.run())
    await until(lambda: counted(made, {"done": 4, "environment_failed": 4}))
    await stopped(playing)


async def test_weights_that_are_to_change_between_episodes_wait_for_those_that_are_played(bench):
    release = asyncio.Event()
    order = []

    class Waits(Once):
        blocking = True

        def step(self, action):
            order.append("step")
            return super().step(action)

    lock = bench.store.episodes.sync_lock
    await bench.engine.pause()
    playing = asyncio.ensure_future(pool(bench, Waits).run())
    await until(lambda: claimed(bench, 1))
    await asyncio.sleep(0.01)

    async def publish():
        async with lock.acquire_weight_sync():
            order.append("published")
            await release.wait()

    publishing = asyncio.ensure_future(publish())
    await asyncio.sleep(0.01)
    assert order == []
    await bench.engine.resume()
    await until(lambda: done(bench, 1))
    await bench.store.groups.register("train", 1, 1, TASK, 2)
    await asyncio.sleep(0.05)
    assert order == ["step", "published"]
    release.set()
    await until(lambda: done(bench, 3))
    await publishing
    await stopped(playing)


@pytest.mark.parametrize("held", [True, False])
async def test_workers_of_seats_do_not_end_a_job_by_their_actions(bench, held):
    class Broken(Once):
        def step(self, action):
            raise ValueError("an action of a worker")

    class Seats:
        wanted = 64
        on_wanted: list = []  # noqa: RUF012

        def open(self, episode):
            return None

        def was_held(self, episode):
            return held

    for group in range(1, 9):
        await bench.store.groups.register("train", group, 1, TASK, 8)
    runners = pool(bench, Broken)
    runners._seats = Seats()
    if held:

        async def many_failed():
            return runners.progress.terminations["forfeit"] > 40

        task = asyncio.ensure_future(runners.run())
        await until(many_failed)
        await stopped(task)
    else:
        with pytest.raises(RolloutFailed, match=r"20.*failed"):
            await asyncio.wait_for(runners.run(), 10)
