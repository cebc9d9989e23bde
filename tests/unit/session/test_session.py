from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
from rendering import render_ids

from palestra.errors import ContextOverflow, EpisodeEnded, NotFound
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import EpisodeSession
from palestra.session.prompting import LONG_TEXT
from palestra.session.registry import call_seed, prompt_digest
from palestra.types.calls import PolicyVersion, SampledTokens, VersionSpan
from palestra.types.messages import GenerationRequest, text_message
from palestra.types.states import TurnState
from unit.building import ids, rows_of
from unit.session.conftest import STOP, Bench, call, in_flight, says, state_of, until

RENDERER = ChatMLRenderer(ByteTokenizer())


# Seeds


def test_a_calls_seed_is_a_hash_of_job_episode_prompt_and_occurrence():
    """Written out a second time: seeds that change would change every replayed run."""
    prompt = np.array([1, 2, 300], np.int32)
    inner = hashlib.blake2b(b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0", digest_size=16).digest()
    digest = hashlib.blake2b(b"7\0train-000000-00\0002\0" + inner, digest_size=8).digest()
    wanted = int.from_bytes(digest, "little") >> 1
    assert call_seed(7, "train-000000-00", prompt_digest(prompt), 2) == wanted
    assert call_seed(0, "e", prompt_digest(ids(1)), 0) == 8573689642262603724


def test_seeds_differ_by_each_of_them_and_fit_63_bits():
    base = (7, "train-000000-00", prompt_digest(ids(1, 2)), 0)
    others = [
        (8, *base[1:]),
        (7, "train-000000-01", *base[2:]),
        (*base[:2], prompt_digest(ids(1, 3)), 0),
        (*base[:2], prompt_digest(ids(1, 2, 0)), 0),
        (*base[:3], 1),
    ]
    seeds = {call_seed(*arguments) for arguments in [base, *others]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


# One call


async def test_a_call_is_on_disk_with_exact_ids_when_it_returns(bench, clock):
    bench.script = says("two")
    await bench.engine.sync_weights("policy", PolicyVersion(1, 5), None)
    session = await bench.session()
    chat = await session.generate_one(call("1 + 1?", agent="solver", time_step=4))
    (stored,) = await bench.recorded(session)
    assert chat.prompt_ids.tolist() == render_ids(
        RENDERER, [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True
    )
    assert chat.completion_ids.tolist() == [*b"two", STOP]
    assert chat.reply == text_message("assistant", "two")
    assert (chat.index, chat.time_step, chat.agent, chat.policy, chat.finish_reason) == (
        0,
        4,
        "solver",
        "policy",
        "stop",
    )
    assert chat.versions == (VersionSpan(PolicyVersion(1, 5), 4),)
    assert (chat.parent, chat.shared, chat.shared_messages) == (None, 0, 0)
    assert (chat.started_at, chat.finished_at) == (clock.wall, clock.wall)
    assert (stored.prompt_ids == chat.prompt_ids).all()
    assert (stored.logprobs == chat.logprobs).all()
    assert stored.sampling == chat.sampling


async def test_a_reply_without_a_stop_token_was_cut(bench):
    bench.script = says("x" * 99, stop=False)
    chat = await (await bench.session()).generate_one(call("a", max_tokens=3))
    assert (chat.finish_reason, chat.completion_ids.tolist()) == ("length", [120, 120, 120])


async def test_pieces_of_several_versions_become_spans(bench):
    class Pieces:
        async def generate(self, request):
            for n, token in ((1, 10), (1, 11), (2, 12), (1, 13)):
                yield SampledTokens(ids=(token,), logprobs=(-float(token),), version=PolicyVersion(0, n))
            yield SampledTokens(ids=(), logprobs=(), version=PolicyVersion(0, 9))

    bench.engine = Pieces()
    bench.context = bench.new_context()
    chat = await (await bench.session()).generate_one(call("a"))
    assert chat.completion_ids.tolist() == [10, 11, 12, 13]
    assert chat.logprobs.tolist() == [-10, -11, -12, -13]
    assert [(s.version.n, s.tokens) for s in chat.versions] == [(1, 2), (2, 1), (1, 1)]


async def test_an_unknown_policy_is_not_found_with_the_known_ones(bench):
    session = await bench.session()
    with pytest.raises(NotFound, match=r"'gpt-4o'.*'policy'"):
        await session.generate_one(call("a", policy="gpt-4o"))
    assert await bench.recorded(session) == ()


# Sampling


async def test_training_is_sampled_as_the_job_says_whatever_is_asked_for(tmp_path, clock):
    bench = Bench(tmp_path, clock, sampling={"max_tokens": 50, "temperature": 0.8})
    session = await bench.session()
    chat = await session.generate_one(call("a", temperature=0.1, seed=5, max_tokens=7))
    assert (chat.sampling.temperature, chat.sampling.max_tokens) == (0.8, 7)
    assert chat.sampling.seed == call_seed(11, session.episode.episode_id, prompt_digest(chat.prompt_ids), 0)
    assert (await session.generate_one(call("b", max_tokens=500))).sampling.max_tokens == 50
    bench.store.close()


async def test_validation_is_greedy(bench):
    chat = await (await bench.session("validation")).generate_one(call("a", temperature=1.0))
    assert chat.sampling.temperature == 0.0


async def test_an_adhoc_episode_is_sampled_as_its_caller_says(bench):
    session = await bench.session("adhoc")
    chat = await session.generate_one(call("a", temperature=0.25, seed=5))
    assert (chat.sampling.temperature, chat.sampling.seed) == (0.25, 5)
    default = await session.generate_one(call("b"))
    assert default.sampling.temperature == 1.0


async def test_a_prompt_over_the_context_is_refused_with_both_numbers(tmp_path, clock):
    bench = Bench(tmp_path, clock, max_context=40)
    session = await bench.session()
    length = len(render_ids(RENDERER, [{"role": "user", "content": "x" * 30}], add_generation_prompt=True))
    with pytest.raises(ContextOverflow, match=rf"\b{length}\b.*\b40\b"):
        await session.generate_one(call("x" * 30))
    assert await bench.recorded(session) == ()
    bench.store.close()


async def test_a_reply_gets_the_room_that_the_prompt_leaves_and_not_a_token_more(tmp_path, clock):
    bench = Bench(tmp_path, clock, max_context=40)
    session = await bench.session()
    around = len(render_ids(RENDERER, [{"role": "user", "content": ""}], add_generation_prompt=True))
    for room in (1, 5):
        chat = await session.generate_one(call("x" * (40 - around - room)))
        assert chat.sampling.max_tokens == room
    with pytest.raises(ContextOverflow):
        await session.generate_one(call("x" * (40 - around)))
    bench.store.close()


# Turns


async def test_a_call_that_goes_on_starts_with_the_exact_ids_of_the_one_before(bench):
    session = await bench.session()
    bench.script = lambda prompt, _: [0xC3, 0x28, STOP]  # no UTF-8: its text is not what was sampled
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", first.reply.text, "b"))
    history = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
    assert second.prompt_ids[: len(history)].tolist() == history
    assert (second.extends, second.shared, second.shared_messages) == (first, len(history), 2)
    third = await session.generate_one(call("a", first.reply.text, "b", second.reply.text, "c"))
    assert (third.extends, third.shared) == (second, len(second.prompt_ids) + 3)
    (row,) = rows_of([first, second, third])
    assert row.ids[row.loss_mask].tolist() == [0xC3, 0x28, STOP] * 3
    for chat, stored in zip((first, second, third), await bench.recorded(session), strict=True):
        assert chat.prompt_ids.tolist() == stored.prompt_ids.tolist()
        assert chat.messages == stored.messages


async def test_a_reply_that_was_cut_is_closed_and_still_reused(bench):
    session = await bench.session()
    bench.script = says("abcdef", stop=False)
    first = await session.generate_one(call("a", max_tokens=3))
    second = await session.generate_one(call("a", "abc", "b"))
    history = [*first.prompt_ids.tolist(), *b"abc"]
    assert second.prompt_ids[: len(history) + 1].tolist() == [*history, STOP]
    assert second.shared == len(history)


async def test_the_longest_history_is_used_and_an_edited_one_goes_back_to_where_it_was_the_same(bench):
    bench.script = says("r")
    session = await bench.session()
    await session.generate_one(call("a"))
    await session.generate_one(call("a", "r", "b"))
    longer = await session.generate_one(call("a", "r", "b", "r", "c"))
    edited = await session.generate_one(call("a", "r", "B", "r", "c"))
    other = await session.generate_one(call("A", "r", "b"))
    assert [None if c.extends is None else c.extends.index for c in (longer, edited, other)] == [1, 0, None]
    assert (longer.fork, edited.fork.reason, edited.fork.call, edited.fork.message) == (None, "edited_message", 2, 2)
    assert (other.fork.reason, other.fork.message) == ("edited_message", 0)
    forked = await session.generate_one(call("a", "r", "other"))
    assert (forked.extends.index, forked.shared_messages, forked.fork) == (0, 2, None)
    sampled = [row.ids[row.loss_mask].tolist() for row in rows_of(await bench.recorded(session))]
    assert sorted(map(len, sampled)) == [2, 2, 4, 4]
    assert [token for row in sampled for token in row] == [ord("r"), STOP] * 6


async def test_a_history_is_found_again_after_a_restart(bench):
    bench.script = says("r")
    session = await bench.session()
    first = await session.generate_one(call("a"))
    again = await bench.reopened(session)
    second = await again.generate_one(call("a", "r", "b"))
    assert (second.index, second.extends.index, second.shared) == (1, 0, len(first.prompt_ids) + 2)


async def test_long_texts_are_rendered_to_the_same_ids(bench):
    bench.script = says("r")
    session = await bench.session()
    text = "y" * (LONG_TEXT + 1)
    bench.policy = bench.policy.model_copy(update={"max_context": 10 * LONG_TEXT})
    session = EpisodeSession(bench.new_context(), session.episode, ())
    chat = await session.generate_one(call(text))
    assert chat.prompt_ids.tolist() == render_ids(
        RENDERER, [{"role": "user", "content": text}], add_generation_prompt=True
    )
    assert (await session.generate_one(call(text, "r", "b"))).extends is chat


async def test_lone_surrogates_do_not_crash(bench):
    session = await bench.session()
    chat = await session.generate_one(GenerationRequest(policy="policy", messages=(text_message("user", "a\ud800"),)))
    assert bytes(chat.prompt_ids[1:8].tolist()) == b"user\na?"
    assert len(await bench.recorded(session)) == 1


# States and counters


async def test_the_state_is_that_of_the_calls(bench, clock):
    session = await bench.session()
    assert state_of(session) is TurnState.PENDING
    await bench.engine.pause()
    tasks = await in_flight(session, call("a"), call("b"))
    assert state_of(session) is TurnState.GENERATING
    clock.advance(3)
    await bench.engine.resume()
    await asyncio.gather(*tasks)
    assert state_of(session) is TurnState.INTERACTING
    assert bench.context.times.seconds[TurnState.GENERATING] == 6.0
    assert bench.context.times.seconds[TurnState.PENDING] == 0.0


async def test_calls_and_tokens_are_counted(bench):
    bench.script = says("r")
    session = await bench.session()
    first = await session.generate_one(call("a"))
    second = await session.generate_one(call("a", "r", "b"))
    counts = bench.context.counts
    assert counts["calls"] == 2
    assert counts["prompt_tokens"] == len(first.prompt_ids) + len(second.prompt_ids)
    assert counts["completion_tokens"] == 4
    assert counts["reused_prompt_tokens"] == len(first.prompt_ids) + 2


async def test_between_calls_it_is_the_agents_move_until_the_episode_ends(bench):
    session = await bench.session()
    times = bench.context.times
    await session.generate_one(call("one"))
    bench.clock.ticks += 5
    assert times._inside[TurnState.INTERACTING] == 1
    await session.generate_one(call("one", "x", "two"))
    bench.clock.ticks += 2
    session.terminate(EpisodeEnded("over"))
    bench.clock.ticks += 100
    assert times.seconds[TurnState.INTERACTING] == 7.0
    assert [times._inside[state] for state in TurnState] == [0, 0, 0, 0]


async def test_an_episode_that_asks_for_many_grammars_leaves_the_others_their_turn(bench, monkeypatch):
    mine, other = await bench.session(request="one"), await bench.session(request="two")
    checking, release = [], asyncio.Event()

    async def check(grammar: str, field: str) -> None:
        checking.append(grammar)
        await release.wait()

    monkeypatch.setattr(bench.grammars, "check", check)
    asked = [
        asyncio.ensure_future(mine.generate_one(call(f"question {n}", response_schema={"const": n}, digest=str(n))))
        for n in range(20)
    ]
    await until(lambda: len(checking) == 2)
    asked.append(asyncio.ensure_future(other.generate_one(call("hello", response_schema={"type": "boolean"}))))
    await until(lambda: len(checking) == 3)
    assert "boolean" in checking[-1]
    release.set()
    assert len(await asyncio.gather(*asked)) == 21
