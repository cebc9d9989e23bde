"""Episodes whose holder is silent, whose server starts anew, or whose calendar jumps."""

from __future__ import annotations

import pytest

from palestra.errors import (
    Conflict,
    EpisodeLeaseExpired,
)
from palestra.types.states import EpisodeState
from unit.building import FakeClock, open_store
from unit.store.playing import claim, end, register, state

YEAR = 365 * 86400.0
FIRST, SECOND = "train-000000-00", "train-000000-01"


async def test_a_lease_that_runs_out_gives_the_episode_back(store, clock):
    await register(store)
    late = await claim(store, "r")
    clock.advance(59)
    assert await store.episodes.expire_leases() == 0
    clock.advance(1)
    assert await store.episodes.expire_leases() == 1
    assert await state(store, FIRST) is EpisodeState.REGISTERED
    assert [e.data for e in await store.log.events(0) if e.kind == "lease_expired"] == [
        {"episode_id": FIRST, "fence": 1}
    ]
    with pytest.raises(EpisodeLeaseExpired):
        await end(store, late)
    assert (await claim(store, "s")).fence == 2


async def test_any_call_renews(store, clock):
    await register(store)
    one = await claim(store)
    for _ in range(5):
        clock.advance(50)
        await store.episodes.renew(FIRST, 1)
        assert await store.episodes.expire_leases() == 0
    assert await end(store, one)


async def test_a_lease_does_not_run_out_while_the_server_itself_is_at_work(store, clock):
    await register(store)
    await claim(store)
    with store.leases.hold(FIRST, 1):
        clock.advance(1000)
        assert await store.episodes.expire_leases() == 0
    assert await store.episodes.expire_leases() == 0
    clock.advance(60)
    assert await store.episodes.expire_leases() == 1


@pytest.mark.parametrize("jump", [-30 * YEAR, 30 * YEAR])
async def test_a_calendar_that_jumps_by_years_changes_nothing(store, clock, jump):
    await register(store)
    one = await claim(store, "r")
    clock.wall += jump
    assert await store.episodes.expire_leases() == 0
    clock.advance(59)
    clock.wall -= 2 * jump
    await store.episodes.renew(FIRST, 1)
    assert await store.episodes.expire_leases() == 0
    two = await claim(store, "s")
    assert await end(store, one)
    clock.wall += 3 * jump
    clock.ticks += 60
    assert await store.episodes.expire_leases() == 1
    with pytest.raises(EpisodeLeaseExpired):
        await end(store, two)
    assert await state(store, FIRST) is EpisodeState.COMPLETED


async def test_a_restart_gives_every_live_lease_a_full_period(tmp_path):
    clock = FakeClock()
    with open_store(tmp_path, clock) as store:
        await register(store)
        one = await claim(store, "r", lease=20.0)
        clock.advance(19)
    later = FakeClock()
    later.ticks, later.wall = 3.0, clock.wall - YEAR  # another boot: monotonic time starts anew
    with open_store(tmp_path, later) as store:
        later.advance(19)
        assert await store.episodes.expire_leases() == 0
        assert (await claim(store, "r")).fence == 1  # the retried claim is still known
        assert await end(store, one)


async def test_after_a_restart_a_lease_that_nobody_uses_runs_out(tmp_path, clock):
    with open_store(tmp_path, clock) as store:
        await register(store)
        await claim(store, "r", lease=20.0)
    with open_store(tmp_path, clock) as store:
        clock.advance(20)
        assert await store.episodes.expire_leases() == 1
        assert (await claim(store, "s")).fence == 2


async def test_ends_are_known_after_a_restart(tmp_path, clock):
    with open_store(tmp_path, clock) as store:
        await register(store)
        one = await claim(store, "r")
        await end(store, one, 0.5)
    with open_store(tmp_path, clock) as store:
        assert not await end(store, one, 0.5)
        with pytest.raises(Conflict):
            await end(store, one, 0.6)
        clock.advance(1000)
        assert await store.episodes.expire_leases() == 0
