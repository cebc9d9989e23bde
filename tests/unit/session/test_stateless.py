"""Calls outside any episode: the same session as for an episode, of which nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from palestra.errors import EpisodeEnded, ServerStopping
from palestra.session import Sessions
from palestra.session.session import StatelessSession
from palestra.types.states import TurnState
from unit.session.conftest import call


@pytest.fixture
def sessions(bench) -> Sessions:
    return Sessions(bench.context, max_waiting_calls=2)


@contextmanager
def stateless(sessions: Sessions) -> Iterator[StatelessSession]:
    sessions.in_flight += 1
    session = sessions.stateless()
    try:
        yield session
    finally:
        sessions.leave(session)


async def rows(bench) -> dict[str, int]:
    def count(connection) -> dict[str, int]:
        names = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
        return {name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}

    return await bench.store.db.read(count)


async def test_a_call_is_answered_and_counted_and_nothing_of_it_is_kept(sessions, bench):
    before = await rows(bench)
    for _ in range(3):
        with stateless(sessions) as session:
            chats = await session.generate(call("a", choices=2))
        assert [len(chat.completion_ids) > 0 for chat in chats] == [True, True]
    assert await rows(bench) == before
    assert "chats" in before
    assert bench.context.counts["calls"] == 6
    assert bench.context.counts["completion_tokens"] > 0
    assert bench.context.rate.per_second > 0
    assert sessions._stateless == set()


async def test_equal_calls_are_different_samples_unless_they_have_a_seed(sessions):
    async def reply(**more) -> tuple[int, str]:
        with stateless(sessions) as session:
            chat = await session.generate_one(call("a", **more))
            return chat.sampling.seed, chat.reply.text

    assert len({await reply() for _ in range(4)}) == 4  # different seeds; short replies may be equal by chance
    assert len({await reply(seed=5) for _ in range(4)}) == 1


async def test_a_retry_is_a_new_call(sessions):
    with stateless(sessions) as session:
        first = await session.generate_one(call("a"))
    with stateless(sessions) as session:
        again = await session.generate_one(call("a", retry=True))
    assert first.episode_id != again.episode_id


async def test_what_the_caller_asks_for_is_what_is_sampled_and_the_policy_says_the_rest(sessions, bench):
    with stateless(sessions) as session:
        asked = (await session.generate_one(call("a", temperature=0.3, top_p=0.5, top_k=4, max_tokens=7))).sampling
        silent = (await session.generate_one(call("b"))).sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.3, 0.5, 4, 7)
    assert (silent.temperature, silent.max_tokens) == (1.0, bench.policy.sampling.max_tokens)


async def test_between_two_calls_nobody_is_waited_for(sessions, bench):
    with stateless(sessions) as session:
        await session.generate_one(call("a"))
        assert bench.context.times._inside[TurnState.INTERACTING] == 1
    assert bench.context.times._inside[TurnState.INTERACTING] == 0
    with pytest.raises(EpisodeEnded):
        await session.generate_one(call("a"))


async def test_stopping_ends_a_call_in_flight(sessions, bench):
    async def played() -> None:
        with stateless(sessions) as session:
            await session.generate_one(call("a"))

    await bench.engine.pause()
    task = asyncio.ensure_future(played())
    while bench.context.times._inside[TurnState.GENERATING] == 0:
        await asyncio.sleep(0)
    sessions.stop(ServerStopping("bye"))
    with pytest.raises(ServerStopping):
        await asyncio.wait_for(task, 60)
