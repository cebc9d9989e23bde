"""Calls of a seat: what is left of one whose worker dies while it is made."""

from __future__ import annotations

import asyncio

import pytest

from palestra.config import SeatsConfig
from palestra.errors import EpisodeLeaseExpired
from palestra.session import SeatSession
from palestra.session.registry import KEYED
from palestra.session.seat_table import SeatTable
from palestra.store.leases import LeaseBook
from palestra.types.messages import Observation, text_message
from unit.session.conftest import busy_writer, call, until


async def seated(bench):
    """A session, the table of its episode's only seat, and the seat's turn."""
    session = await bench.session()
    leases = LeaseBook(bench.clock, 600.0)
    table = SeatTable(session.episode, SeatsConfig(roles=["white"]), leases, 5, bench.clock)
    observation = Observation(id="o0", parents=(), agent="white", content=(text_message("user", "go"),))
    table.show(observation, 0)
    turn = asyncio.ensure_future(table.ask(observation))
    await asyncio.sleep(0)
    return session, table, turn


def asks(session, table, worker: str):
    """A worker takes the seat and makes the same call as any other."""
    fence = table.take("white", worker, 60.0)
    seat = SeatSession(session, table, "white", fence)
    return fence, asyncio.ensure_future(seat.generate(call("go", agent="white")))


async def test_a_call_that_is_being_written_when_its_worker_dies_leaves_its_seed_to_the_next(bench):
    session, table, turn = await seated(bench)
    async with busy_writer(bench.store):
        fence, first = asks(session, table, "one")
        await until(lambda: session._registry._recordings)
        table.leave("white", fence)
        fence, second = asks(session, table, "other")
        with pytest.raises(EpisodeLeaseExpired):
            await first
    (chat,) = await second
    table.act("white", fence, "o0", chat.reply)
    assert await turn == chat.reply
    written = await bench.recorded(session)
    assert [one.index for one in written] == [0, 1]
    assert written[0].sampling.seed == written[1].sampling.seed
    assert written[0].completion_ids.tolist() == chat.completion_ids.tolist()
    assert table.unused_calls == [0]
    third = asyncio.ensure_future(session.generate(call("go", agent="white", digest="third")))
    assert (await third)[0].sampling.seed != chat.sampling.seed


async def test_a_call_that_is_being_sampled_when_its_worker_dies_leaves_its_seed_to_the_next(bench):
    """The cancelled call ends after the next one has begun, and takes nothing from it."""
    seeds = []
    session, table, turn = await seated(bench)
    script = bench.script

    def watched(prompt, sampling):
        seeds.append(sampling.seed)
        return script(prompt, sampling)

    bench.script = watched
    fence, first = asks(session, table, "one")
    await until(lambda: seeds)
    table.leave("white", fence)
    fence, second = asks(session, table, "other")
    with pytest.raises(EpisodeLeaseExpired):
        await first
    (chat,) = await second
    turn.cancel()
    later = await session.generate(call("go", agent="white", digest="third"))
    assert len({chat.sampling.seed, later[0].sampling.seed}) == 2
    assert seeds[-2:] == [chat.sampling.seed, later[0].sampling.seed]


async def test_a_repeated_call_with_a_key_is_answered_from_the_record_after_its_reply_was_sent(bench):
    session, table, turn = await seated(bench)
    seat = SeatSession(session, table, "white", table.take("white", "one", 60.0))
    asked = call("go", agent="white", digest=f"{KEYED}1", retry=True)
    (first,) = await seat.generate(asked)
    seat.delivered(first)
    assert await seat.generate(asked) == (first,)
    (other,) = await seat.generate(call("go", agent="white", digest=f"{KEYED}2", retry=True))
    assert other.index == 1
    assert len(await bench.recorded(session)) == 2
    turn.cancel()


@pytest.mark.parametrize("asks_here", [True, False])
async def test_a_player_is_played_elsewhere_if_its_actions_come_from_no_call_here(bench, asks_here):
    session, table, turn = await seated(bench)
    assert not table.is_played_elsewhere("white"), "it has not acted"
    fence = table.take("white", "one", 60.0)
    said = text_message("assistant", "x")
    if asks_here:
        (chat,) = await SeatSession(session, table, "white", fence).generate(call("go", agent="white"))
        said = chat.reply
    table.act("white", fence, "o0", said)
    assert await turn == said
    assert table.is_played_elsewhere("white") == (not asks_here)
