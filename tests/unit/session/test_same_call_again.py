"""The same call again: another sample, a retry, or one that was lost on the way."""

from __future__ import annotations

import asyncio

import pytest

from palestra.errors import EngineFailure
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import Session
from palestra.session.registry import call_seed, prompt_digest
from palestra.session.session import not_recorded
from palestra.store.codec import chat_row
from palestra.types.states import TurnState
from unit.session.conftest import busy_writer, call, in_flight, says, until

RENDERER = ChatMLRenderer(ByteTokenizer())


async def test_equal_calls_are_distinct_samples_in_order(bench):
    session = await bench.session()
    chats = [await session.generate_one(call("a")) for _ in range(3)]
    wanted = [call_seed(11, session.episode.episode_id, prompt_digest(chats[0].prompt_ids), n) for n in range(3)]
    assert [c.sampling.seed for c in chats] == wanted
    again = await bench.reopened(session)
    assert (await again.generate_one(call("a"))).sampling.seed == call_seed(
        11, session.episode.episode_id, prompt_digest(chats[0].prompt_ids), 3
    )


async def test_the_order_in_which_different_calls_arrive_changes_nothing(bench):
    one = await bench.session()
    two = Session(bench.context, not_recorded, one.episode_id, one.fence, "train")  # another run of the same job
    first = {t: (await one.generate_one(call(t))).sampling.seed for t in "abc"}
    second = {t: (await two.generate_one(call(t))).sampling.seed for t in "cab"}
    assert first == second


async def test_a_retry_gets_the_recorded_call_and_samples_nothing(bench):
    session = await bench.session()
    first = await session.generate_one(call("a"))
    calls = bench.engine.calls
    assert await session.generate_one(call("a", retry=True)) is first
    assert bench.engine.calls == calls
    assert len(await bench.recorded(session)) == 1
    assert bench.context.counts["retries_answered"] == 1


async def test_what_was_delivered_or_is_not_said_to_be_a_retry_is_sampled_anew(bench):
    session = await bench.session()
    first = await session.generate_one(call("a"))
    assert (await session.generate_one(call("a"))).index == 1
    session.delivered(first)
    second = await session.generate_one(call("a", retry=True))  # the second of the two is still undelivered
    assert second.index == 1
    session.delivered(second)
    assert (await session.generate_one(call("a", retry=True))).index == 2
    assert (await session.generate_one(call("b", retry=True))).index == 3


class Noting:
    """A listener with the records of calls as they were when each was on disk."""

    def __init__(self) -> None:
        self.rows = []

    def started(self, choice, chat) -> None:
        pass

    def sampled(self, choice, piece) -> None:
        pass

    def finished(self, choice, chat) -> None:
        self.rows.append((chat, chat_row(chat)))


async def test_what_follows_a_recorded_call_does_not_change_it(bench):
    session, noting = await bench.session(), Noting()
    chats = await session.generate(call("a", choices=3), noting)
    assert await session.generate(call("a", choices=3, retry=True), noting) == chats
    session.delivered(*chats)
    await session.generate_one(call("a", chats[0].reply.text, "b"), noting)
    session.free_seed(chats[1])
    await session.generate_one(call("a"), noting)
    session.terminate(LookupError("over"))
    assert len(noting.rows) == 8
    assert [chat_row(chat) for chat, _ in noting.rows] == [row for _, row in noting.rows]
    known = {chat.index: row for chat, row in noting.rows}
    assert [chat_row(chat) for chat in await bench.recorded(session)] == [known[index] for index in sorted(known)]


async def test_a_retry_after_a_restart_gets_what_was_recorded(bench):
    session = await bench.session()
    bench.script = says("r")
    await session.generate_one(call("a"))
    await session.generate_one(call("a", "r", "b"))
    again = await bench.reopened(session)
    assert (await again.generate_one(call("a", "r", "b", retry=True))).index == 1
    assert (await again.generate_one(call("a", retry=True))).index == 2  # its reply had arrived: "b" goes on from it
    assert len(await bench.recorded(session)) == 3


async def test_a_call_that_failed_is_the_same_sample_when_it_is_sent_again(bench):
    session = await bench.session()
    real = bench.script

    def fails(prompt, sampling):
        raise EngineFailure("no")

    bench.script = fails
    with pytest.raises(EngineFailure):
        await session.generate_one(call("a"))
    bench.script = lambda prompt, sampling: []
    with pytest.raises(EngineFailure, match="no token"):
        await session.generate_one(call("a"))
    assert await bench.recorded(session) == ()
    assert bench.context.counts["calls_incomplete"] == 2
    bench.script = real
    chat = await session.generate_one(call("a"))
    assert chat.sampling.seed == call_seed(11, session.episode.episode_id, prompt_digest(chat.prompt_ids), 0)


async def test_a_call_whose_caller_went_away_is_not_recorded_and_is_the_same_sample_when_sent_again(bench):
    session = await bench.session()
    await bench.engine.pause()
    (task,) = await in_flight(session, call("a"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.engine.resume()
    assert await bench.recorded(session) == ()
    chat = await session.generate_one(call("a"))
    assert chat.sampling.seed == call_seed(11, session.episode.episode_id, prompt_digest(chat.prompt_ids), 0)


@pytest.mark.parametrize("restart", [False, True])
async def test_of_two_equal_calls_the_one_that_is_lost_and_sent_again_is_not_the_others_sample(bench, restart):
    session = await bench.session()
    await bench.engine.pause()
    lost, kept = await in_flight(session, call("a"), call("a"))
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await bench.engine.resume()
    second = await kept
    if restart:
        session = await bench.reopened(session)
    first = await session.generate_one(call("a"))
    seeds = [call_seed(11, session.episode.episode_id, prompt_digest(first.prompt_ids), n) for n in range(2)]
    assert [first.sampling.seed, second.sampling.seed] == seeds


async def test_a_call_that_was_committed_while_its_caller_went_away_is_what_a_retry_gets(bench):
    """Otherwise a reply that the agent never saw would be trained beside the one that it did see."""
    session = await bench.session()
    async with busy_writer(bench.store):
        task = asyncio.ensure_future(session.generate_one(call("a")))
        await until(lambda: any(t.state is TurnState.INTERACTING for t in session._turns._open))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await bench.store.db.write(lambda c: None)
    await asyncio.sleep(0.01)
    again = await session.generate_one(call("a", retry=True))
    recorded = await bench.recorded(session)
    assert [c.index for c in recorded] == [again.index] == [0]
    assert bench.engine.calls == 1
