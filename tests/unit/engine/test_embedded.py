from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import InvalidRequest, ModelError
from palestra.models.causal_lm import CausalLM, load_causal_lm
from palestra.types.calls import SamplingParams, TokenSequence
from unit.building import engine_request
from unit.engine.calling import DRAWN, FOREVER, GREEDY, full_forward, prompt, reply, serving, until_it_samples

pytestmark = pytest.mark.ci

# What comes out


@pytest.mark.parametrize("length", [1, 2, 40, 63, 64, 65, 130])
async def test_greedy_is_what_transformers_generates(tiny, reference, length):
    ids = prompt(length, seed=length)
    wanted = reference.generate(
        torch.tensor(ids[None].astype(np.int64)), do_sample=False, max_new_tokens=12, pad_token_id=256, eos_token_id=258
    )[0, length:].tolist()
    async with serving(tiny) as engine:
        found, _, _ = await reply(engine, ids, GREEDY)
    assert found == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("length", [3, 60])
async def test_logprobs_are_those_of_a_full_forward_pass_also_past_bucket_boundaries(
    tiny, reference, temperature, length
):
    """From 60 + 80 tokens the row moves through three buckets."""
    ids = prompt(length)
    sampling = SamplingParams(temperature=temperature, max_tokens=80, min_tokens=80, seed=3)
    async with serving(tiny) as engine:
        found, logprobs, _ = await reply(engine, ids, sampling)
    assert len(found) == 80
    assert 258 not in found
    scores = full_forward(reference, ids, found, temperature)
    banned = np.log1p(-np.exp(_stop_logprobs(reference, ids, found, temperature)))  # min_tokens takes the stop away
    assert np.allclose(logprobs, np.array(scores) - banned, atol=1e-4)


def _stop_logprobs(reference, ids, completion, temperature) -> np.ndarray:
    whole = torch.tensor([[*ids.tolist(), *completion]])
    with torch.inference_mode():
        logits = reference(whole).logits[0].double() / (temperature or 1.0)
    return logits.log_softmax(-1)[len(ids) - 1 : -1, 258].numpy()


async def test_many_at_once_are_each_what_a_full_forward_pass_says(tiny, reference):
    prompts = [prompt(n, seed=n) for n in (1, 5, 5, 17, 64, 90, 128, 3, 33, 61, 62, 63)]
    async with serving(tiny, max_batch=5, limits={"PREFILL_TOKENS": 100}) as engine:
        replies = await asyncio.gather(
            *(reply(engine, p, replace(DRAWN, seed=i, max_tokens=4 + 7 * i)) for i, p in enumerate(prompts))
        )
    for ids, (found, logprobs, _) in zip(prompts, replies, strict=True):
        assert np.allclose(logprobs, full_forward(reference, ids, found, 1.0), atol=1e-4)


async def test_equal_seeds_give_equal_replies_and_others_others(tiny):
    async with serving(tiny) as engine:
        one, again, other = [
            await reply(engine, prompt(9), replace(DRAWN, seed=seed, min_tokens=12)) for seed in (1, 1, 2)
        ]
    assert one[0] == again[0] != other[0]
    assert one[1] == pytest.approx(again[1], abs=1e-5)  # most of its prompt was computed in another pass


async def test_a_group_with_one_prompt_computes_it_once(tiny):
    async with serving(tiny) as engine:
        await engine.pause()
        calls = [asyncio.ensure_future(reply(engine, prompt(50), replace(DRAWN, seed=s))) for s in range(8)]
        await asyncio.sleep(0.001)
        await engine.resume()
        found = await asyncio.gather(*calls)
        assert engine.load().prefilled_tokens == 50
        await reply(engine, prompt(50), DRAWN)
        assert engine.load().prefilled_tokens == 51  # the last token's hidden state gives the first of the reply
    assert len({tuple(ids) for ids, _, _ in found}) == 8


async def test_without_a_prefix_cache_everything_is_computed_and_the_same(tiny):
    async with serving(tiny, limits={"PREFIX_TOKENS": 0}) as engine:
        found = [await reply(engine, prompt(20), DRAWN) for _ in range(2)]
        assert engine.load().prefilled_tokens == 40
    assert found[0] == found[1]


async def test_the_prefix_cache_forgets_what_was_used_longest_ago(tiny):
    one_token = replace(DRAWN, max_tokens=1)
    async with serving(tiny, limits={"PREFIX_TOKENS": 60}) as engine:
        for seed in (1, 2, 1, 3):  # 2 is the oldest when 3 comes
            await reply(engine, prompt(30, seed), one_token)
        assert engine.load().prefilled_tokens == 3 * 30 + 1
        await reply(engine, prompt(30, 1), one_token)
        assert engine.load().prefilled_tokens == 3 * 30 + 2
        await reply(engine, prompt(30, 2), one_token)
        assert engine.load().prefilled_tokens == 4 * 30 + 2


async def test_a_turn_that_goes_on_computes_only_what_is_new(tiny, reference):
    """Prompt and reply of the turn before are in the cache, but for the reply's last token, which was never fed."""
    async with serving(tiny) as engine:
        first, _, _ = await reply(engine, prompt(50), replace(DRAWN, min_tokens=12))
        longer = np.concatenate((prompt(50), np.array(first, np.int32), prompt(7, 9)))
        before = engine.load().prefilled_tokens
        found, logprobs, _ = await reply(engine, longer, DRAWN)
        assert engine.load().prefilled_tokens - before == 1 + 7
        other = np.concatenate((longer[:30], prompt(20, 8)))  # leaves it in the middle
        before = engine.load().prefilled_tokens
        await reply(engine, other, DRAWN)
        assert engine.load().prefilled_tokens - before == 20
    assert np.allclose(logprobs, full_forward(reference, longer, found, 1.0), atol=1e-4)


async def test_a_long_prompt_in_pieces_does_not_hold_up_others_and_is_the_same(tiny, reference):
    long, heard = prompt(900, 4), []

    async def listen(who, pieces):
        async for _ in pieces:
            heard.append(who)

    async with serving(tiny, limits={"PREFILL_CHUNK": 50}) as engine:
        talking = asyncio.ensure_future(listen("talking", engine.generate(engine_request(prompt(4), FOREVER))))
        while not heard:
            await asyncio.sleep(0.001)
        heard.clear()
        ids, logprobs, _ = await reply(engine, long, DRAWN)
        talking.cancel()
    assert len(heard) >= 900 // 50 - 1  # one between each two pieces
    assert np.allclose(logprobs, full_forward(reference, long, ids, 1.0), atol=1e-4)


async def test_calls_wait_until_their_longest_reply_fits_into_memory(tiny):
    """A token of the tiny model takes 2 layers x 2 x 2 heads x 16 x 4 bytes = 512 bytes; 320 tokens fit."""
    async with serving(tiny, cache_gib=320 * 512 / 2**30) as engine:
        assert engine.load().kv_bytes == 320 * 512
        sampling = SamplingParams(temperature=1.0, max_tokens=90, min_tokens=90, seed=1)
        calls = [asyncio.ensure_future(reply(engine, prompt(30, s), replace(sampling, seed=s))) for s in range(5)]
        most = 0
        while not all(call.done() for call in calls):
            load = engine.load()
            most = max(most, load.running)
            assert load.kv_bytes_used <= load.kv_bytes
            await asyncio.sleep(0.001)
        assert most == 2  # 128 tokens each, in steps of 64
        assert all(len(call.result()[0]) == 90 for call in calls)


async def test_leaving_frees_the_place_within_one_pass(tiny):
    async with serving(tiny) as engine:
        pieces = engine.generate(engine_request(prompt(4), FOREVER))
        await anext(pieces)
        await pieces.aclose()
        passes = engine.load().passes
        await asyncio.sleep(0.05)
        assert engine.load().passes <= passes + 1
        assert (engine.load().waiting, engine.load().running) == (0, 0)
        assert engine._core.scheduler.budget.reserved == 0


async def test_the_first_of_a_group_may_leave_while_the_prompt_is_computed(tiny):
    async with serving(tiny, limits={"PREFILL_TOKENS": 10}) as engine:
        calls = [asyncio.ensure_future(reply(engine, prompt(500), replace(DRAWN, seed=s))) for s in range(3)]
        while engine.load().prefilled_tokens < 50:
            await asyncio.sleep(0.001)
        calls[0].cancel()
        found = await asyncio.gather(*calls[1:])
        assert engine.load().prefilled_tokens == 500  # what was computed for the first one is used
    assert all(ids for ids, _, _ in found)


# Where it ends


async def test_a_reply_ends_with_the_stop_token_or_at_max_tokens(tiny):
    async with serving(tiny) as engine:
        whole, _, _ = await reply(engine, prompt(9), GREEDY)
    assert len(whole) == 12
    stop = whole[5]
    async with serving(tiny, stops=(stop,)) as engine:
        assert (await reply(engine, prompt(9), GREEDY))[0] == whole[: whole.index(stop) + 1]
        assert (await reply(engine, prompt(9), replace(GREEDY, max_tokens=1)))[0] == whole[:1]


async def test_stop_tokens_can_not_come_before_min_tokens(tiny):
    stops = set(range(200))
    async with serving(tiny, stops=stops) as engine:
        for seed in range(5):
            found, _, _ = await reply(engine, prompt(9), replace(DRAWN, seed=seed, min_tokens=5, max_tokens=100))
            assert not stops & set(found[:5])
            assert found[-1] in stops
            assert not stops & set(found[:-1])


# Side by side


async def test_a_call_that_arrives_in_the_middle_does_not_wait_for_the_longer_one(tiny):
    async with serving(tiny) as engine, aclosing(engine.generate(engine_request(prompt(4), FOREVER))) as endless:
        await anext(endless)
        found, _, _ = await asyncio.wait_for(reply(engine, prompt(4, 1), replace(DRAWN, min_tokens=12)), 10)
        assert len(found) == 12
        before = engine.load().passes
        async with asyncio.timeout(10):  # and the longer one goes on
            while engine.load().passes < before + 5:
                await anext(endless)


async def deterministic_dtype() -> torch.dtype:
    """A precision in which this machine's matrix products do not depend on the number of rows."""
    for dtype in (torch.bfloat16, torch.float32):
        try:
            async with serving(load_causal_lm("tiny-random", dtype), deterministic=True):
                return dtype
        except ModelError:
            continue
    pytest.skip("matrix products of this machine depend on the number of rows in every precision")


@pytest.mark.slow
async def test_with_deterministic_a_result_is_the_same_bit_by_bit_alone_and_among_nine():
    dtype = await deterministic_dtype()
    model = load_causal_lm("tiny-random", dtype)
    calls = [
        (prompt(length, seed), SamplingParams(temperature=t, max_tokens=most, min_tokens=most, seed=seed))
        for seed, (length, t, most) in enumerate(
            [(5, 1.0, 70), (63, 1.0, 5), (64, 0.7, 3), (1, 1.0, 64), (130, 1.0, 9), (5, 0.0, 70), (40, 1.3, 30)]
        )
    ]
    calls += [(calls[0][0], replace(calls[0][1], seed=77)), (calls[4][0], replace(calls[4][1], temperature=0.0))]
    async with serving(model, deterministic=True) as engine:
        together = await asyncio.gather(*(reply(engine, *call) for call in calls))
    for call, found in zip(calls, together, strict=True):
        async with serving(model, deterministic=True) as engine:
            assert await reply(engine, *call) == found


async def test_deterministic_is_refused_where_the_machine_can_not_keep_it(tiny, monkeypatch):
    """A product whose bits depend on the number of rows, as those of some machines do."""
    real = torch.nn.functional.linear
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, w, b=None: real(x, w, b) + 1e-3 * (len(x) < 5))
    with pytest.raises(ModelError, match="deterministic"):
        async with serving(tiny, deterministic=True):
            pass


async def test_leaving_in_the_middle_frees_the_place(tiny):
    async with serving(tiny, max_batch=2) as engine:
        endless = [engine.generate(engine_request(prompt(4, s), FOREVER)) for s in range(2)]
        for pieces in endless:
            await anext(pieces)
        third = asyncio.ensure_future(reply(engine, prompt(5), DRAWN))
        await asyncio.sleep(0.05)
        assert not third.done()
        await endless[0].aclose()
        await asyncio.wait_for(third, 10)
        await endless[1].aclose()


async def test_a_caller_that_is_cancelled_frees_the_place(tiny):
    async with serving(tiny, max_batch=2) as engine:
        tasks = [asyncio.ensure_future(reply(engine, prompt(4, s), FOREVER)) for s in range(4)]
        await until_it_samples(engine)
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(f, asyncio.CancelledError) for f in found)
        await asyncio.wait_for(reply(engine, prompt(5), DRAWN), 10)


async def test_more_calls_than_places_are_all_served(tiny):
    async with serving(tiny, max_batch=2) as engine:
        found = await asyncio.gather(*(reply(engine, prompt(4, s), replace(DRAWN, seed=s)) for s in range(11)))
        alone = [await reply(engine, prompt(4, s), replace(DRAWN, seed=s)) for s in range(11)]
    assert [ids for ids, _, _ in found] == [ids for ids, _, _ in alone]


async def test_other_stop_tokens_end_a_reply(tiny):
    async with serving(tiny) as engine:
        whole, _, _ = await reply(engine, prompt(8), replace(DRAWN, max_tokens=40))
        ids, _, _ = await reply(engine, prompt(8), replace(DRAWN, max_tokens=40, stop_ids=(whole[5],)))
    assert ids == whole[: whole.index(whole[5]) + 1]


async def test_the_most_probable_tokens_come_with_each_token(tiny):
    async with serving(tiny) as engine:
        pieces = [p async for p in engine.generate(engine_request(prompt(8), replace(GREEDY, top_logprobs=3)))]
    for piece in pieces:
        ((best, logprob), *others) = piece.top[0]
        assert (best, logprob) == (piece.ids[0], piece.logprobs[0])
        assert len(others) == 2
        assert all(p <= logprob for _, p in others)


async def test_a_reply_with_a_grammar_matches_it_whatever_the_seed(tiny):
    import json

    from llguidance import LLMatcher

    from palestra.grammars.matcher import vocabulary_of
    from palestra.grammars.pool import Grammars
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer("tiny-random")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    settings = EmbeddedEngineConfig(threads=1, dtype="float32", max_batch=16)
    grammars = Grammars(vocabulary_of(tokenizer, tiny.vocab_size))
    policy = PolicyModel(model=tiny, stop_ids=frozenset((258,)), grammars=grammars)
    engine = EmbeddedEngine({"policy": policy}, settings)
    try:
        how = [SamplingParams(temperature=1.0, max_tokens=200, seed=s, grammar=grammar) for s in range(8)]
        found = await asyncio.gather(*(reply(engine, prompt(6), h) for h in how))
        with pytest.raises(InvalidRequest, match="grammar"):
            await reply(engine, prompt(6), replace(how[0], grammar="{nonsense"))
    finally:
        await engine.close()
        grammars.close()
    for ids, logprobs, _ in found:
        assert ids[-1] == 258
        value = json.loads(tokenizer.decode(ids[:-1]))
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "y")
        assert max(logprobs) <= 0.0
        assert sum(p > -1e-3 for p in logprobs) > 3  # where the grammar leaves one token only, it is certain


async def test_a_sliding_window_is_kept_in_pieces_of_a_prompt_and_in_replies():
    from unit.models.test_causal_lm import two_of

    own, flat = two_of("mistral", sliding_window=7, vocab_size=259)
    long = prompt(40)
    async with serving(CausalLM(flat), stops=(), limits={"PREFILL_TOKENS": 16}) as engine:
        ids, logprobs, _ = await reply(engine, long, replace(DRAWN, max_tokens=30))
        again, others, _ = await reply(engine, np.concatenate((long, np.array(ids, np.int32))), DRAWN)
    assert np.allclose(logprobs, full_forward(own, long, ids, 1.0), atol=1e-4)
    assert np.allclose(others, full_forward(own, np.concatenate((long, np.array(ids))), again, 1.0), atol=1e-4)


@pytest.mark.parametrize("length", [2, 64, 700])
@pytest.mark.parametrize("chunk", [64, 4096])
async def test_a_score_is_what_a_full_forward_pass_says_while_replies_go_on(tiny, reference, length, chunk):
    """More tokens than logits exist at a time, in passes of `PREFILL_CHUNK`; a running reply stays what it was."""
    ids = prompt(length, seed=length)
    with torch.inference_mode():
        scores = reference(torch.tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
    wanted = scores[torch.arange(length - 1), torch.tensor(ids[1:].astype(np.int64))].numpy()
    async with serving(tiny, limits={"PREFILL_CHUNK": chunk}) as engine:
        alone = await reply(engine, prompt(9), replace(DRAWN, min_tokens=12))
        beside, found = await asyncio.gather(
            reply(engine, prompt(9), replace(DRAWN, min_tokens=12)), engine.score("policy", TokenSequence(ids))
        )
    assert np.allclose(found, wanted, atol=1e-4)
    assert beside[0] == alone[0]


async def test_what_can_not_be_scored_is_refused(tiny):
    async with serving(tiny) as engine:
        for ids in ([], [-1], [10**6], [[1, 2], [3, 4]], [1] * (tiny.max_positions + 1)):
            with pytest.raises(InvalidRequest, match=rf"prompt.*1.*{tiny.max_positions}"):
                await engine.score("policy", TokenSequence(np.array(ids, np.int32)))
        with pytest.raises(ModelError, match="not 'other'"):
            await engine.score("other", TokenSequence(prompt(3)))


async def test_the_first_command_computes_with_the_threads_that_were_set(tiny):
    found = []
    async with serving(tiny, threads=3) as engine:
        await engine._on_thread(lambda: found.append(torch.get_num_threads()))
    assert found == [3]
