from __future__ import annotations

import asyncio

import pytest

from palestra.errors import ClaimOver
from unit.building import TASK
from unit.store.playing import claim, end, register

LEASE = 30.0


async def spin(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def sync(store, seen: list[str], go: asyncio.Event) -> None:
    async with store.episodes.sync_lock.acquire_weight_sync():
        seen.append("sync")
        await go.wait()


async def test_a_sync_waits_for_episodes_of_any_worker_and_claims_wait_for_the_sync(store):
    await register(store, size=3)
    seen, go = [], asyncio.Event()
    first = await claim(store, "r0")
    syncing = asyncio.ensure_future(sync(store, seen, go))
    await spin()
    assert seen == []
    assert await store.episodes.claim("w", "r1", None) is None
    assert await store.episodes.claim_many("w", "r2", 2) == []
    assert (await store.episodes.claim("w", "r0", None)).episode_id == first.episode_id  # its answer was lost
    since = store.episodes.available.count
    await end(store, first)
    await spin()
    assert seen == ["sync"]
    assert await store.episodes.claim("w", "r3", None) is None
    go.set()
    await syncing
    assert store.episodes.available.count > since
    assert await store.episodes.claim("w", "r4", None) is not None
    with pytest.raises(ClaimOver):
        await store.episodes.claim("w", "r0", None)


async def test_an_episode_that_a_rollout_plays_inside_its_own_is_claimed_before_the_sync(store):
    await register(store, size=1)
    seen, go = [], asyncio.Event()
    go.set()
    outer = await claim(store, "r0")
    inner = await store.episodes.register_adhoc(TASK, "inner")
    syncing = asyncio.ensure_future(sync(store, seen, go))
    await spin()
    played = await store.episodes.claim("w", "r1", None, inner)
    await end(store, outer)
    await spin()
    assert seen == []
    await end(store, played)
    await asyncio.wait_for(syncing, 5)


async def test_a_claim_by_name_waits_for_a_sync_that_has_begun(store):
    seen, go = [], asyncio.Event()
    named = await store.episodes.register_adhoc(TASK, "named")
    syncing = asyncio.ensure_future(sync(store, seen, go))
    await spin()
    assert await asyncio.gather(*(store.episodes.claim("w", f"r{n}", None, named) for n in range(2))) == [None, None]
    go.set()
    await syncing


async def test_the_lease_of_a_dead_worker_does_not_hold_a_sync_longer_than_it_lasts(store, clock):
    await register(store, size=1)
    seen, go = [], asyncio.Event()
    go.set()
    await store.episodes.claim("w", "r0", LEASE)
    syncing = asyncio.ensure_future(sync(store, seen, go))
    await spin()
    clock.advance(LEASE + 1)
    assert await store.episodes.expire_leases() == 1
    await asyncio.wait_for(syncing, 5)


async def test_a_cancelled_sync_lets_episodes_be_claimed(store):
    await register(store, size=2)
    await claim(store, "r0")
    syncing = asyncio.ensure_future(sync(store, [], asyncio.Event()))
    await spin()
    syncing.cancel()
    await asyncio.gather(syncing, return_exceptions=True)
    assert await store.episodes.claim("w", "r1", None) is not None


async def test_a_repeated_claim_of_an_episode_that_was_given_back_is_over_even_if_it_is_the_next_one(store):
    await register(store, size=1)
    first = await claim(store, "r0")
    await store.episodes.abort(first.episode_id, first.fence, "given back", discard=False)
    with pytest.raises(ClaimOver):
        await store.episodes.claim("w", "r0", None)
    assert (await store.episodes.claim("w", "r1", None)).fence == 2
