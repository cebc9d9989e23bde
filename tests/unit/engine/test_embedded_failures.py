"""What goes wrong in one call stays there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from palestra.engine.embedded import scheduler
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import ModelRunner, PolicyModel
from palestra.engine.embedded.request import RunningRequest
from palestra.errors import EngineFailure, GrammarRefused, InvalidRequest, ModelError
from palestra.grammars.matcher import BOUNDS, vocabulary_of
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import load_tokenizer
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams
from unit.building import engine_request
from unit.engine.calling import (
    DRAWN,
    FOREVER,
    GREEDY,
    all_of,
    full_forward,
    prompt,
    reply,
    serving,
    until_it_samples,
)


async def test_an_error_in_the_model_fails_the_calls_in_flight_and_no_later_one(tiny, reference):
    real, broken = tiny.hidden, asyncio.Event()

    def hidden(*arguments):
        if broken.is_set():
            raise RuntimeError("out of memory")
        return real(*arguments)

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        calls = [engine.generate(engine_request(prompt(4, s), FOREVER)) for s in range(3)]
        for call in calls:
            await anext(call)
        broken.set()
        for call in calls:
            with pytest.raises(EngineFailure, match="of memory"):
                await all_of(call)
        broken.clear()
        ids, logprobs, _ = await reply(engine, prompt(4), DRAWN)
    assert np.allclose(logprobs, full_forward(reference, prompt(4), ids, 1.0), atol=1e-4)


LONG = replace(DRAWN, min_tokens=12)
MARKED = replace(LONG, logit_bias=((77, 100.0),))  # samples nothing but the token 77
OTHERS = [replace(LONG, seed=seed, logit_bias=((77, -100.0),)) for seed in range(3)]


async def beside_a_bad_one(engine, ids=None) -> None:
    """Replies beside one that fails are those that they are alone; their rows move to a larger bucket on the way."""
    alone = [await reply(engine, prompt(58, how.seed) % 70, how) for how in OTHERS]
    await engine.pause()
    calls = [asyncio.ensure_future(reply(engine, prompt(58, how.seed) % 70, how)) for how in OTHERS]
    calls.insert(1, asyncio.ensure_future(reply(engine, prompt(4) % 70 if ids is None else ids, MARKED)))
    await asyncio.sleep(0)
    await engine.resume()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found.pop(1), EngineFailure)
    assert [one[0] for one in found] == [one[0] for one in alone]
    for (_, now, _), (_, before, _) in zip(found, alone, strict=True):
        assert np.allclose(now, before, atol=1e-4)
    assert engine._core.scheduler.budget.reserved == 0
    assert not engine._core.scheduler.has_begun()


async def test_a_row_that_breaks_a_decoding_pass_fails_alone(tiny):
    real = tiny.hidden

    def hidden(ids, positions, attend, _pictures=None):
        found = real(ids, positions, attend)
        if ((ids == 77) & (positions > 6)).any():  # after the pass has written keys and values
            raise RuntimeError("77 is no good")
        return found

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        await beside_a_bad_one(engine)


async def test_a_pass_that_fails_for_all_rows_together_is_computed_row_by_row(tiny):
    async with serving(tiny) as engine:
        alone = [await reply(engine, prompt(58, how.seed), how) for how in OTHERS]
        real = tiny.hidden

        def hidden(ids, *more):
            if len(ids) > 1:
                raise RuntimeError("too many")
            return real(ids, *more)

        calls = [engine.generate(engine_request(prompt(58, how.seed), how)) for how in OTHERS]
        first = [await anext(call) for call in calls]
        tiny.hidden = hidden
        rest = [await all_of(call) for call in calls]
    assert [
        [token for piece in (one, *more) for token in piece.ids] for one, more in zip(first, rest, strict=True)
    ] == [ids for ids, _, _ in alone]


@pytest.mark.parametrize("first", [0, 5])
async def test_a_row_that_can_not_be_sampled_fails_alone(tiny, monkeypatch, first):
    """At the first token, and in the middle of the reply."""
    real = ModelRunner._row_sampling

    def row_sampling(runner, request):
        if request.sampling == MARKED and len(request.reply) >= first:
            raise OverflowError("too large")
        return real(runner, request)

    monkeypatch.setattr(ModelRunner, "_row_sampling", row_sampling)
    async with serving(tiny) as engine:
        await beside_a_bad_one(engine)


@pytest.mark.parametrize("where", ["allocate_prompt", "add_row", "_key", "append"])
async def test_what_breaks_before_or_after_the_passes_fails_its_request_alone(tiny, monkeypatch, where):
    owner = {"_key": scheduler, "append": RunningRequest}.get(where, ModelRunner)
    real = getattr(owner, where)

    def broken(*arguments):
        if any(getattr(one, "sampling", None) == MARKED or np.shape(one)[-2:-1] == (13,) for one in arguments):
            raise MemoryError("none left") if where == "add_row" else RuntimeError("no")
        return real(*arguments)

    monkeypatch.setattr(owner, where, broken)
    async with serving(tiny) as engine:
        await beside_a_bad_one(engine, ids=prompt(13) % 70)


async def test_an_error_while_a_prompt_is_computed_leaves_no_half_of_it(tiny, reference):
    real = tiny.hidden
    failures = iter([True])

    def hidden(ids, positions, attend, _pictures=None):
        out = real(ids, positions, attend)
        if next(failures, False):
            raise RuntimeError("no")
        return out

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        with pytest.raises(EngineFailure, match="no"):
            await reply(engine, prompt(30), DRAWN)
        assert engine._core.scheduler.budget.reserved == 0
        ids, logprobs, _ = await reply(engine, prompt(30), DRAWN)
    assert np.allclose(logprobs, full_forward(reference, prompt(30), ids, 1.0), atol=1e-4)


async def test_an_unknown_policy_is_an_error_at_once(tiny):
    async with serving(tiny) as engine:
        with pytest.raises(ModelError, match="'other'"):
            await anext(engine.generate(engine_request(prompt(3), DRAWN, "other")))
        with pytest.raises(ModelError):
            engine.version("other")
        with pytest.raises(ModelError):
            await engine.sync_weights("other", PolicyVersion(0, 1), LocalWeights([]))


async def test_closing_fails_the_calls_in_flight_and_those_that_come_later(tiny):
    async with serving(tiny, max_batch=2) as engine:
        calls = [asyncio.ensure_future(reply(engine, prompt(4, s), FOREVER)) for s in range(4)]
        await until_it_samples(engine)
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, EngineFailure)
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(reply(engine, prompt(4), DRAWN), 60)


async def test_a_defect_of_the_engine_itself_fails_all_at_once_and_is_told_to_whoever_waits(tiny):
    async with serving(tiny) as engine:
        telling = asyncio.ensure_future(engine.failure())
        calls = [asyncio.ensure_future(reply(engine, prompt(4, s), FOREVER)) for s in range(3)]
        await until_it_samples(engine)
        assert not telling.done()
        engine._core.step = lambda: 1 // 0
        async with asyncio.timeout(60):
            assert await telling == "the engine failed: ZeroDivisionError: integer division or modulo by zero"
            assert await engine.failure() == await telling  # also later
            for refused in (
                reply(engine, prompt(4), DRAWN),
                engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights([])),
                engine.pause(),
                engine.resume(),
            ):
                with pytest.raises(EngineFailure, match="ZeroDivisionError"):
                    await refused
            for call in calls:
                with pytest.raises(EngineFailure, match="ZeroDivisionError"):
                    await call


async def test_new_weights_that_wait_when_the_engine_is_closed_are_refused_and_nobody_waits_for_ever(tiny):
    async with serving(tiny, finish=True) as engine:
        call = asyncio.ensure_future(reply(engine, prompt(4), FOREVER))
        await until_it_samples(engine)
        update = asyncio.ensure_future(engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights([])))
        await asyncio.sleep(0.05)
        failing = asyncio.ensure_future(engine.failure())
    async with asyncio.timeout(60):
        for left in (call, update):
            with pytest.raises(EngineFailure, match=r"engine.*stopped"):
                await left
    await asyncio.sleep(0.05)
    assert not failing.done()  # that is no failure
    failing.cancel()


async def test_a_prompt_that_breaks_the_model_fails_alone_among_those_computed_with_it(tiny):
    real = tiny.hidden

    def hidden(ids, positions, attend, _pictures=None):
        if (ids == 77).any():
            raise RuntimeError("77 is no good")
        return real(ids, positions, attend)

    tiny.hidden = hidden
    good = [prompt(20, s) % 70 for s in range(3)]
    bad = np.array([1, 77, 2], np.int32)
    async with serving(tiny) as engine:
        await engine.pause()
        calls = [asyncio.ensure_future(reply(engine, ids, GREEDY)) for ids in (*good[:2], bad, good[2])]
        await asyncio.sleep(0)
        await engine.resume()
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(f, EngineFailure) for f in found] == [False, False, True, False]


async def test_out_of_memory_ends_the_newest_call_and_the_others_go_on(tiny):
    real, full = tiny.hidden, asyncio.Event()

    def hidden(ids, positions, attend, _pictures=None):
        if full.is_set() and len(ids) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return real(ids, positions, attend)

    tiny.hidden = hidden
    async with serving(tiny) as engine:
        calls = [engine.generate(engine_request(prompt(4, s), FOREVER)) for s in range(3)]
        for call in calls:
            await anext(call)
        full.set()
        with pytest.raises(EngineFailure, match="allocate"):
            await all_of(calls[2])
        for call in calls[:2]:
            await anext(call)
            await call.aclose()


@pytest.mark.parametrize("ids", [[], [1, 259], [-1]])
async def test_a_prompt_with_ids_that_do_not_exist_is_refused_before_it_meets_others(tiny, ids):
    async with serving(tiny) as engine:
        with pytest.raises(InvalidRequest, match="to 258"):
            await reply(engine, np.array(ids, np.int32), DRAWN)
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await reply(engine, prompt(3), replace(DRAWN, logit_bias=((300, 1.0),)))


async def test_a_reply_that_comes_to_a_bound_of_its_grammar_fails_alone_and_by_the_requests_fault(tiny):
    growing = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": "^x*.*a.{200}$"}}]})
    word = json.dumps({"grammars": [{"json_schema": {"enum": ["a word that takes a while"] * 2}}]})
    tokenizer = load_tokenizer("tiny-random")
    grammars = Grammars(vocabulary_of(tokenizer, tiny.vocab_size), replace(BOUNDS, lexer_states=400))
    settings = EmbeddedEngineConfig(threads=1, dtype="float32", max_batch=8)
    policy = PolicyModel(model=tiny, stop_ids=frozenset((258,)), grammars=grammars)
    engine = EmbeddedEngine({"policy": policy}, settings)
    how = SamplingParams(temperature=1.0, max_tokens=300, seed=1)
    try:
        bad = [
            asyncio.ensure_future(reply(engine, prompt(5, s), replace(how, grammar=growing, seed=s))) for s in (1, 2)
        ]
        good = [asyncio.ensure_future(reply(engine, prompt(5, s), replace(how, grammar=word))) for s in (1, 2)]
        free = asyncio.ensure_future(reply(engine, prompt(5), replace(how, max_tokens=40)))
        for error in await asyncio.gather(*bad, return_exceptions=True):
            assert isinstance(error, GrammarRefused), error
            assert (error.http_status, error.retryable) == (400, False)
            assert "too many states" in str(error)
        for ids, _, _ in await asyncio.gather(*good):
            assert tokenizer.decode(ids[:-1]) == '"a word that takes a while"'
        assert len((await free)[0]) > 0
        assert engine._core.scheduler.budget.reserved == 0
    finally:
        await engine.close()
        grammars.close()


async def test_scores_that_are_no_numbers_fail_their_call_alone(tiny, reference):
    real = tiny.logits

    def logits(hidden, *more):
        found = real(hidden, *more)
        if len(found) > 1:
            found[0] = float("nan")
        return found

    async with serving(tiny) as engine:
        others = [engine.generate(engine_request(prompt(4, s), FOREVER)) for s in range(3)]
        for call in others:
            await anext(call)
        tiny.logits = logits
        for call in (others[0], others[2]):  # the last row takes the place of the first; then one is left
            with pytest.raises(EngineFailure, match=r"scores.*numbers"):
                await all_of(call)
        for _ in range(100):
            assert (await anext(others[1])).ids
        tiny.logits = real
        assert (await reply(engine, prompt(4), GREEDY))[0]
        await others[1].aclose()
