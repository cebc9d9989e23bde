from __future__ import annotations

import asyncio

import pytest

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired, NotFound, ServerStopping, TooManyRequests
from palestra.session import EpisodeKey, Sessions
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.states import TurnState
from unit.building import TASK
from unit.session.conftest import call, state_of

EPISODE = "train-000000-00"


@pytest.fixture
async def sessions(bench):
    await bench.store.groups.register("train", 0, 1, TASK, 2)
    await bench.store.episodes.claim("w", "r", None)
    return Sessions(bench.context, max_waiting_calls=2)


async def test_a_lease_has_one_session_however_often_and_at_once_it_is_opened(sessions):
    found = await asyncio.gather(*(sessions.open(EPISODE, 1) for _ in range(5)))
    assert len({id(s) for s in found}) == 1
    assert await sessions.open(EPISODE, 1) is found[0]


async def test_opening_renews_the_lease(sessions, bench, clock):
    for _ in range(4):
        clock.advance(50)
        await sessions.open(EPISODE, 1)
        assert await bench.store.episodes.expire_leases() == 0


async def test_only_the_holder_of_the_lease_may_open(sessions, bench):
    with pytest.raises(NotFound):
        await sessions.open("nope", 1)
    with pytest.raises(EpisodeLeaseExpired):
        await sessions.open(EPISODE, 2)
    with pytest.raises(EpisodeLeaseExpired):
        await sessions.open("train-000000-01", 0)
    await bench.store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0}))
    with pytest.raises(EpisodeEnded):
        await sessions.open(EPISODE, 1)


async def test_a_session_that_is_not_in_memory_is_rebuilt_from_the_store(sessions, bench):
    session = await sessions.open(EPISODE, 1)
    first = await session.generate_one(call("a"))
    rebuilt = await Sessions(bench.context, 2).open(EPISODE, 1)
    assert rebuilt is not session
    second = await rebuilt.generate_one(call("a", first.reply.text, "b"))
    assert (second.index, second.extends.index) == (1, 0)


@pytest.mark.parametrize("how", ["end", "give back", "discard", "expire"])
async def test_when_the_lease_is_over_the_session_is_and_its_calls_are(sessions, bench, clock, how):
    session = await sessions.open(EPISODE, 1)
    await bench.engine.pause()
    task = asyncio.ensure_future(session.generate_one(call("a")))
    while state_of(session) is not TurnState.GENERATING:
        await asyncio.sleep(0)
    if how == "end":
        await bench.store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0}))
    elif how == "expire":
        clock.advance(4000)  # longer than an attempt may take in all
        assert await bench.store.episodes.expire_leases() == 1
    else:
        await bench.store.episodes.abort(EPISODE, 1, "", discard=how == "discard")
    with pytest.raises(EpisodeLeaseExpired, match=EPISODE):
        await asyncio.wait_for(task, 5)
    assert state_of(session) is TurnState.TERMINATED
    assert (await bench.store.calls.of_lease(EPISODE, 1))[1] == ()


async def test_the_next_lease_has_a_session_of_its_own_without_the_former_calls(sessions, bench):
    first = await sessions.open(EPISODE, 1)
    chat = await first.generate_one(call("a"))
    await bench.store.episodes.abort(EPISODE, 1, "", discard=False)
    await bench.store.episodes.claim("w", "s", None)
    second = await sessions.open(EPISODE, 2)
    again = await second.generate_one(call("a"))
    assert (again.index, again.parent, again.fence) == (0, None, 2)
    assert again.sampling.seed == chat.sampling.seed  # the attempt is played again as it was


async def test_so_many_calls_may_be_in_flight_and_no_more(sessions, bench):
    opened = [await sessions.enter(None) for _ in range(2)]
    assert sessions.in_flight == 2
    with pytest.raises(TooManyRequests, match="2 calls"):
        await sessions.enter(None)
    for session in opened:
        sessions.leave(session)
    assert sessions.in_flight == 0
    assert bench.context.counts["calls_refused"] == 1
    with pytest.raises(NotFound):
        await sessions.enter(EpisodeKey("nope", 1))
    assert sessions.in_flight == 0


async def test_stopping_ends_the_calls_in_flight_and_takes_no_more(sessions, bench):
    session = await sessions.open(EPISODE, 1)
    await bench.engine.pause()
    task = asyncio.ensure_future(session.generate_one(call("a")))
    while state_of(session) is not TurnState.GENERATING:
        await asyncio.sleep(0)
    sessions.stop(ServerStopping("bye"))
    with pytest.raises(ServerStopping):
        await asyncio.wait_for(task, 5)
    with pytest.raises(ServerStopping):
        await sessions.enter(None)
    assert (await bench.store.calls.of_lease(EPISODE, 1))[1] == ()


@pytest.mark.parametrize("how", ["end", "give back"])
async def test_a_lease_that_ends_while_its_session_is_opened_has_none(sessions, bench, how):
    """Otherwise the session would stay for ever, and its calls would be sampled for nothing."""
    real = bench.store.calls.of_lease

    async def lease(episode_id, fence):
        found = await real(episode_id, fence)
        if how == "end":
            await bench.store.episodes.end(EPISODE, 1, EpisodeEnd(rewards={"agent": 1.0}))
        else:
            await bench.store.episodes.abort(EPISODE, 1, "", discard=False)
        return found

    bench.store.calls.of_lease = lease
    with pytest.raises(EpisodeEnded if how == "end" else EpisodeLeaseExpired):
        await sessions.open(EPISODE, 1)
    assert sessions._episodes == {}
