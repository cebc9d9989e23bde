from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.rollout.sync_lock import RolloutSyncLock


async def spin(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_a_sync_waits_for_rollouts_and_those_that_begin_wait_for_the_sync():
    lock, seen, go = RolloutSyncLock(), [], asyncio.Event()

    async def rollout(name):
        async with lock.acquire_rollout():
            seen.append(name)
            await go.wait()

    async def sync():
        async with lock.acquire_weight_sync():
            seen.append("sync")

    tasks = [asyncio.ensure_future(rollout("a"))]
    await spin()
    tasks.append(asyncio.ensure_future(sync()))
    await spin()
    tasks.append(asyncio.ensure_future(rollout("b")))
    await spin()
    assert seen == ["a"]
    go.set()
    await asyncio.gather(*tasks)
    assert seen == ["a", "sync", "b"]


async def test_what_a_rollout_starts_does_not_wait_behind_a_sync_that_waits_for_it():
    """Trap 8: parent holds the lock, a sync waits for it, and its subagent begins."""
    lock = RolloutSyncLock()

    async def subagent():
        async with lock.acquire_rollout():
            return "found"

    async def parent(started, ready):
        async with lock.acquire_rollout():
            started.set()
            await ready.wait()
            return await asyncio.gather(subagent(), asyncio.ensure_future(subagent()))

    async def sync():
        async with lock.acquire_weight_sync():
            pass

    started, ready = asyncio.Event(), asyncio.Event()
    rolling = asyncio.ensure_future(parent(started, ready))
    await started.wait()
    syncing = asyncio.ensure_future(sync())
    await spin()
    ready.set()
    assert await asyncio.wait_for(rolling, 2) == ["found", "found"]
    await asyncio.wait_for(syncing, 2)


async def test_a_rollout_that_wants_to_sync_is_told_instead_of_waiting_for_itself():
    lock = RolloutSyncLock()
    async with lock.acquire_rollout():
        with pytest.raises(RuntimeError, match="can't wait"):
            async with lock.acquire_weight_sync():
                pass


@given(st.lists(st.tuples(st.sampled_from(["rollout", "sync"]), st.integers(0, 4), st.integers(0, 6)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_never_both_whatever_is_cancelled_when_and_the_lock_is_free_at_the_end(plan):
    """(kind, turns of the loop it lasts, turns after which it is cancelled; 6: never)."""

    async def run() -> None:
        lock = RolloutSyncLock()
        now = {"rollout": 0, "sync": 0}

        async def one(kind, turns):
            acquire = lock.acquire_rollout if kind == "rollout" else lock.acquire_weight_sync
            async with acquire():
                now[kind] += 1
                try:
                    assert now["sync"] <= 1
                    assert not (now["sync"] and now["rollout"])
                    await spin(turns)
                finally:
                    now[kind] -= 1

        async def cancelled(task, after):
            await spin(after)
            if after < 6:
                task.cancel()

        tasks = [asyncio.ensure_future(one(kind, turns)) for kind, turns, _ in plan]
        for task, (_, _, after) in zip(tasks, plan, strict=True):
            await cancelled(task, after)
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert not [f for f in found if f is not None and not isinstance(f, asyncio.CancelledError)]
        async with asyncio.timeout(1), lock.acquire_weight_sync():
            pass
        async with asyncio.timeout(1), lock.acquire_rollout():
            pass

    asyncio.run(run())
