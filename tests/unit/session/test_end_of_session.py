"""How a session ends, and what is in flight then."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from palestra.errors import EpisodeEnded, EpisodeLeaseExpired
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.types.states import TurnState
from unit.session.conftest import busy_writer, call, in_flight, state_of, until

RENDERER = ChatMLRenderer(ByteTokenizer())


async def test_what_is_still_being_written_when_the_episode_ends_is_on_disk_and_nothing_is_kept_in_memory(bench):
    session = await bench.session()
    first = await session.generate_one(call("a"))
    async with busy_writer(bench.store):
        task = asyncio.ensure_future(session.generate_one(call("a", first.reply.text, "b")))
        await until(lambda: session._registry._recordings)
        (recording,) = session._registry._recordings.values()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session.terminate(EpisodeEnded("over"))
    await recording
    assert [chat.index for chat in await bench.recorded(session)] == [0, 1]
    assert len(session._prompts.earlier("policy", "agent").trie()) == 0
    with pytest.raises(EpisodeEnded):
        await session.generate_one(call("a", retry=True))


async def test_an_episode_that_is_over_needs_no_garbage_collector(bench):
    session = await bench.session()
    for number in range(3):
        await session.generate_one(call(f"question {number}"))
    tokens = [weakref.ref(node.edges) for node in session._prompts.earlier("policy", "agent").trie().nodes()]
    assert tokens
    gc.disable()
    try:
        session.terminate(EpisodeEnded("over"))
        assert not [ref for ref in tokens if ref() is not None]
    finally:
        gc.enable()


async def test_terminating_cancels_the_calls_in_flight_which_are_not_recorded(bench):
    session = await bench.session()
    await session.generate_one(call("before"))
    await bench.engine.pause()
    tasks = await in_flight(session, call("a"), call("b"))
    session.terminate(EpisodeLeaseExpired("over"))
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(found, EpisodeLeaseExpired)
    await bench.engine.resume()
    assert state_of(session) is TurnState.TERMINATED
    with pytest.raises(EpisodeLeaseExpired):
        await session.generate_one(call("c"))
    assert [c.messages[0].text for c in await bench.recorded(session)] == ["before"]
    assert bench.context.counts["calls_incomplete"] == 2


async def test_a_lease_that_is_lost_during_a_call_refuses_its_record(bench):
    session = await bench.session()
    bench.store.episodes.on_lease_over.clear()
    await bench.engine.pause()
    (task,) = await in_flight(session, call("a"))
    await bench.store.episodes.abort(session.episode.episode_id, 1, "", discard=False)
    await bench.engine.resume()
    with pytest.raises(EpisodeLeaseExpired):
        await task
    assert await bench.recorded(session) == ()


async def test_a_lease_does_not_run_out_while_the_engine_is_slow(bench, clock):
    session = await bench.session()
    await bench.engine.pause()
    (task,) = await in_flight(session, call("a"))
    clock.advance(1000)
    assert await bench.store.episodes.expire_leases() == 0
    await bench.engine.resume()
    await task
    clock.advance(59)
    assert await bench.store.episodes.expire_leases() == 0
    clock.advance(1)
    assert await bench.store.episodes.expire_leases() == 1
