"""New weights, and what was computed with the old ones."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.errors import EngineFailure, ModelError
from palestra.models.loading import LoadedModels
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams
from unit.building import engine_request
from unit.engine.calling import DRAWN, FOREVER, full_forward, prompt, reply, serving


def halved(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach() * 0.5) for name, p in model.named_parameters()]


async def test_new_weights_have_a_version_and_drop_what_was_computed_with_the_old_ones(tiny, reference):
    ids = prompt(20)
    async with serving(tiny) as engine:
        old, _, versions = await reply(engine, ids, replace(DRAWN, min_tokens=12))
        assert set(versions) == {PolicyVersion(0, 0)}
        weights = halved(tiny)
        await engine.sync_weights("policy", PolicyVersion(2, 7), LocalWeights(weights))
        assert engine.version("policy") == PolicyVersion(2, 7)
        new, logprobs, versions = await reply(engine, ids, DRAWN)
        assert set(versions) == {PolicyVersion(2, 7)}
        assert engine.load().prefilled_tokens == 40
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
    async with serving(tiny) as engine, aclosing(engine.generate(engine_request(prompt(4), FOREVER))) as pieces:
        async for piece in pieces:
            versions.append(piece.version.n)
            if len(versions) == 3:
                await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(halved(tiny)))
            if versions[-10:] == [1] * 10:
                break
    assert versions[:3] == [0] * 3
    assert versions == sorted(versions)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
async def test_weights_that_do_not_fit_are_refused_whole(tiny, damage):
    # Without kept prefixes: of a prompt that is known one token is computed, and its product may round another way.
    async with serving(tiny, limits={"PREFIX_TOKENS": 0}) as engine:
        before = await reply(engine, prompt(8), DRAWN)
        weights = halved(tiny)
        name, tensor = weights.pop()
        if damage == "unknown":
            weights.append(("nonsense", tensor))
        elif damage == "shape":
            weights.append((name, tensor[:-1]))
        with pytest.raises(ModelError):
            await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(weights))
        assert engine.version("policy") == PolicyVersion(0, 0)
        assert await reply(engine, prompt(8), DRAWN) == before


async def test_a_closed_engine_keeps_no_weights():
    model, _ = LoadedModels().own("tiny-random", torch.float32, torch.device("cpu"), None)
    alive = weakref.ref(model)
    async with serving(model) as engine:
        await reply(engine, prompt(8), DRAWN)
        counted = engine.load().sampled_tokens
    del model
    gc.collect()
    assert alive() is None
    assert engine.load().sampled_tokens == counted
    with pytest.raises(EngineFailure):
        await reply(engine, prompt(8), DRAWN)


async def test_while_paused_nothing_is_sampled(tiny):
    async with serving(tiny) as engine:
        running = engine.generate(engine_request(prompt(4), FOREVER))
        await anext(running)
        await engine.pause()
        passes = engine.load().passes
        waiting = asyncio.ensure_future(reply(engine, prompt(5), DRAWN))
        await asyncio.sleep(0.05)
        assert engine.load().passes == passes
        assert not waiting.done()
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(halved(tiny)))
        assert engine.load().passes == passes
        await engine.resume()
        assert set((await waiting)[2]) == {PolicyVersion(0, 1)}
        await running.aclose()


async def test_replies_can_be_finished_before_new_weights_count(tiny):
    weights = [(name, p.detach().clone()) for name, p in tiny.named_parameters()]
    slow = SamplingParams(temperature=1.0, max_tokens=300, min_tokens=300, seed=1)
    async with serving(tiny, finish=True) as engine:
        running = asyncio.ensure_future(reply(engine, prompt(4), slow))
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.001)
        update = asyncio.ensure_future(engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(weights)))
        await asyncio.sleep(0.001)
        later = asyncio.ensure_future(reply(engine, prompt(4), DRAWN))
        await update
        assert running.done() or len((await running)[0]) == 300
        assert {v.n for v in (await running)[2]} == {0}
        assert {v.n for v in (await later)[2]} == {1}


async def test_what_was_computed_under_two_versions_is_not_used_again(tiny):
    weights = [(name, p.detach().clone()) for name, p in tiny.named_parameters()]
    slow = SamplingParams(temperature=1.0, max_tokens=200, min_tokens=200, seed=1)
    async with serving(tiny) as engine:
        running = asyncio.ensure_future(reply(engine, prompt(40), slow))
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.001)
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(weights))
        ids, _, versions = await running
        assert {v.n for v in versions} == {0, 1}
        before = engine.load().prefilled_tokens
        await reply(engine, np.concatenate((prompt(40), np.array(ids, np.int32))), DRAWN)
        assert engine.load().prefilled_tokens - before == 240


async def test_a_prompt_that_was_begun_with_replaced_weights_is_not_shared_with_later_calls(tiny, reference):
    weights = [(name, p.detach() * 1.5) for name, p in tiny.named_parameters()]
    async with serving(tiny, limits={"PREFILL_TOKENS": 10}) as engine:
        early = asyncio.ensure_future(reply(engine, prompt(500), DRAWN))
        while engine.load().prefilled_tokens < 50:
            await asyncio.sleep(0.001)
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(weights))
        ids, logprobs, _ = await reply(engine, prompt(500), replace(DRAWN, seed=6))
        await early
        again, others, _ = await reply(engine, prompt(500), replace(DRAWN, seed=7))  # from the prefix cache
    reference = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.5)
    assert np.allclose(logprobs, full_forward(reference, prompt(500), ids, 1.0), atol=1e-3)
    assert np.allclose(others, full_forward(reference, prompt(500), again, 1.0), atol=1e-3)
