from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.config import EngineConfig
from palestra.errors import EngineFailure, ModelError
from palestra.inference.embedded import EmbeddedEngine
from palestra.models.causal_lm import load_causal_lm
from palestra.schemas.records import PolicyVersion, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=12, seed=0)
DRAWN = Sampling(temperature=1.0, max_tokens=12, seed=5)
FOREVER = Sampling(temperature=1.0, max_tokens=10**7, min_tokens=10**7, seed=1)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


@asynccontextmanager
async def serving(model, stops=(258,), deterministic=False, **config):
    settings = EngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 16} | config)
    engine = EmbeddedEngine(model, "policy", stops, settings, deterministic)
    try:
        yield engine
    finally:
        await engine.close()


async def reply(engine, ids, sampling):
    """(ids, logprobs, versions), token by token."""
    pieces = [piece async for piece in engine.generate("policy", ids, sampling)]
    return (
        [i for piece in pieces for i in piece.ids],
        [p for piece in pieces for p in piece.logprobs],
        [piece.version for piece in pieces for _ in piece.ids],
    )


def full_forward(reference, ids, completion, temperature) -> list[float]:
    """log softmax(logits / temperature) of each completion token, from one pass of transformers over all of it."""
    whole = torch.tensor([[*ids.tolist(), *completion]])
    with torch.inference_mode():
        logits = reference(whole).logits[0].double() / (temperature or 1.0)
    rows = logits.log_softmax(-1)[len(ids) - 1 : -1]
    return rows[range(len(completion)), completion].tolist()


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
    sampling = Sampling(temperature=temperature, max_tokens=80, min_tokens=80, seed=3)
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
    async with serving(tiny, prefill_tokens=100, max_batch=5) as engine:
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
    assert one == again
    assert one[0] != other[0]


async def test_a_group_with_one_prompt_computes_it_once(tiny):
    async with serving(tiny) as engine:
        await engine.pause()
        calls = [asyncio.ensure_future(reply(engine, prompt(50), replace(DRAWN, seed=s))) for s in range(8)]
        await asyncio.sleep(0)
        await engine.resume()
        found = await asyncio.gather(*calls)
        assert engine.prefilled_tokens == 50
        await reply(engine, prompt(50), DRAWN)
        assert engine.prefilled_tokens == 50
    assert len({tuple(ids) for ids, _, _ in found}) == 8


async def test_without_a_prefix_cache_everything_is_computed_and_the_same(tiny):
    async with serving(tiny, prefix_cache_tokens=0) as engine:
        found = [await reply(engine, prompt(20), DRAWN) for _ in range(2)]
        assert engine.prefilled_tokens == 40
    assert found[0] == found[1]


async def test_the_prefix_cache_forgets_what_was_used_longest_ago(tiny):
    async with serving(tiny, prefix_cache_tokens=60) as engine:
        for seed in (1, 2, 1, 3):  # 2 is the oldest when 3 comes
            await reply(engine, prompt(30, seed), DRAWN)
        assert engine.prefilled_tokens == 90
        await reply(engine, prompt(30, 1), DRAWN)
        assert engine.prefilled_tokens == 90
        await reply(engine, prompt(30, 2), DRAWN)
        assert engine.prefilled_tokens == 120


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
    async with serving(tiny) as engine, aclosing(engine.generate("policy", prompt(4), FOREVER)) as endless:
        await anext(endless)
        found, _, _ = await asyncio.wait_for(reply(engine, prompt(4, 1), replace(DRAWN, min_tokens=12)), 10)
        assert len(found) == 12
        before = engine.passes
        async with asyncio.timeout(10):  # and the longer one goes on
            while engine.passes < before + 5:
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


async def test_with_deterministic_a_result_is_the_same_bit_by_bit_alone_and_among_nine():
    dtype = await deterministic_dtype()
    model = load_causal_lm("tiny-random", dtype)
    calls = [
        (prompt(length, seed), Sampling(temperature=t, max_tokens=most, min_tokens=most, seed=seed))
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
        endless = [engine.generate("policy", prompt(4, s), FOREVER) for s in range(2)]
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
        await asyncio.sleep(0.05)
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


# What goes wrong


async def test_an_error_in_the_model_fails_the_calls_in_flight_and_no_later_one(tiny, reference):
    real, broken = tiny.hidden, asyncio.Event()

    def hidden(*arguments):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("out of memory")
        return real(*arguments)

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        calls = [asyncio.ensure_future(reply(engine, prompt(4, s), FOREVER)) for s in range(3)]
        await asyncio.sleep(0.05)
        broken.set()
        for found in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(found, EngineFailure)
            assert "out of memory" in str(found)
        ids, logprobs, _ = await reply(engine, prompt(4), DRAWN)
    assert np.allclose(logprobs, full_forward(reference, prompt(4), ids, 1.0), atol=1e-4)


async def test_an_error_while_a_prompt_is_computed_leaves_no_half_of_it(tiny, reference):
    real = tiny.hidden
    failures = iter([True])

    def hidden(ids, positions, attend):
        out = real(ids, positions, attend)
        if next(failures, False):
            raise RuntimeError("no")
        return out

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        with pytest.raises(EngineFailure, match="no"):
            await reply(engine, prompt(30), DRAWN)
        ids, logprobs, _ = await reply(engine, prompt(30), DRAWN)
    assert np.allclose(logprobs, full_forward(reference, prompt(30), ids, 1.0), atol=1e-4)


async def test_an_unknown_policy_is_an_error_at_once(tiny):
    async with serving(tiny) as engine:
        with pytest.raises(ModelError, match="'other'"):
            await anext(engine.generate("other", prompt(3), DRAWN))
        with pytest.raises(ModelError):
            engine.version("other")
        with pytest.raises(ModelError):
            await engine.update_weights("other", PolicyVersion(0, 1), [])


async def test_closing_fails_the_calls_in_flight_and_those_that_come_later(tiny):
    async with serving(tiny, max_batch=2) as engine:
        calls = [asyncio.ensure_future(reply(engine, prompt(4, s), FOREVER)) for s in range(4)]
        await asyncio.sleep(0.05)
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, EngineFailure)
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(reply(engine, prompt(4), DRAWN), 5)


# New weights


def halved(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach() * 0.5) for name, p in model.named_parameters()]


async def test_new_weights_have_a_version_and_drop_what_was_computed_with_the_old_ones(tiny, reference):
    ids = prompt(20)
    async with serving(tiny) as engine:
        old, _, versions = await reply(engine, ids, replace(DRAWN, min_tokens=12))
        assert set(versions) == {PolicyVersion(0, 0)}
        weights = halved(tiny)
        await engine.update_weights("policy", PolicyVersion(2, 7), weights)
        assert engine.version("policy") == PolicyVersion(2, 7)
        new, logprobs, versions = await reply(engine, ids, DRAWN)
        assert set(versions) == {PolicyVersion(2, 7)}
        assert engine.prefilled_tokens == 40
    with torch.no_grad():
        for (_, p), (_, w) in zip(reference.named_parameters(), weights, strict=True):
            p.copy_(w)
    try:
        assert np.allclose(logprobs, full_forward(reference, ids, new, 1.0), atol=1e-4)
    finally:
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(2.0)
    assert old != new


async def test_a_call_in_flight_goes_on_and_every_token_says_its_version(tiny):
    versions = []
    async with serving(tiny) as engine, aclosing(engine.generate("policy", prompt(4), FOREVER)) as pieces:
        async for piece in pieces:
            versions.append(piece.version.n)
            if len(versions) == 3:
                await engine.update_weights("policy", PolicyVersion(0, 1), halved(tiny))
            if versions[-10:] == [1] * 10:
                break
    assert versions[:3] == [0] * 3
    assert versions == sorted(versions)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
async def test_weights_that_do_not_fit_are_refused_whole(tiny, damage):
    async with serving(tiny) as engine:
        before = await reply(engine, prompt(8), DRAWN)
        weights = halved(tiny)
        name, tensor = weights.pop()
        if damage == "unknown":
            weights.append(("nonsense", tensor))
        elif damage == "shape":
            weights.append((name, tensor[:-1]))
        with pytest.raises(ModelError):
            await engine.update_weights("policy", PolicyVersion(0, 1), weights)
        assert engine.version("policy") == PolicyVersion(0, 0)
        assert await reply(engine, prompt(8), DRAWN) == before


async def test_while_paused_nothing_is_sampled(tiny):
    async with serving(tiny) as engine:
        running = engine.generate("policy", prompt(4), FOREVER)
        await anext(running)
        await engine.pause()
        passes = engine.passes
        waiting = asyncio.ensure_future(reply(engine, prompt(5), DRAWN))
        await asyncio.sleep(0.05)
        assert engine.passes == passes
        assert not waiting.done()
        await engine.update_weights("policy", PolicyVersion(0, 1), halved(tiny))
        assert engine.passes == passes
        await engine.resume()
        assert set((await waiting)[2]) == {PolicyVersion(0, 1)}
        await running.aclose()
