"""Two policies in one engine: each answers as it would alone, bit for bit, also while the other gets new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import EngineFailure, ModelError
from palestra.models.causal_lm import CausalLM, load_causal_lm
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams
from unit.building import engine_request
from unit.engine.calling import DRAWN, FOREVER, prompt
from unit.engine.test_embedded import deterministic_dtype

OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)
CALLS = [
    (prompt(length, seed), SamplingParams(temperature=t, max_tokens=most, min_tokens=most, seed=seed))
    for seed, (length, t, most) in enumerate([(5, 1.0, 300), (63, 1.0, 5), (64, 0.7, 3), (130, 1.0, 9), (40, 0.0, 30)])
]


def scaled(dtype: torch.dtype, factor: float) -> CausalLM:
    """The tiny model, with all weights multiplied."""
    model = load_causal_lm("tiny-random", dtype)
    for _, parameter in model.named_parameters():
        parameter.data.mul_(factor)
    return model


def weights_of(model: CausalLM) -> LocalWeights:
    return LocalWeights([(name, p.detach().clone()) for name, p in model.named_parameters()])


@asynccontextmanager
async def engine_of(models: Mapping[str, CausalLM], deterministic: bool = True, finish: bool = False, **config):
    settings = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 16} | config)
    policies = {name: PolicyModel(model=model, stop_ids=frozenset((258,))) for name, model in models.items()}
    engine = EmbeddedEngine(policies, settings, deterministic, finish=finish)
    try:
        yield engine
    finally:
        await engine.close()


async def reply_of(engine, policy, ids, sampling):
    """(id, logprob, version) of each token."""
    pieces = [piece async for piece in engine.generate(engine_request(ids, sampling, policy))]
    return [(piece.ids[0], piece.logprobs[0], piece.version) for piece in pieces]


async def replies(engine, *policies: str):
    """The replies of each policy to all calls, asked for at the same time and in turns."""
    asked = [(policy, *call) for call in CALLS for policy in policies]
    found = await asyncio.gather(*(reply_of(engine, *one) for one in asked))
    return {
        policy: [reply for (name, *_), reply in zip(asked, found, strict=True) if name == policy] for policy in policies
    }


@pytest.mark.slow
async def test_two_policies_answer_as_each_would_alone():
    dtype = await deterministic_dtype()
    models = {"a": scaled(dtype, 1.0), "b": scaled(dtype, 1.5)}
    async with engine_of(models) as engine:
        together = await replies(engine, "a", "b")
        assert (engine.version("a"), engine.version("b")) == (OLD, OLD)
    for name, model in models.items():
        async with engine_of({name: model}) as engine:
            assert (await replies(engine, name))[name] == together[name]
    assert together["a"] != together["b"]


@pytest.mark.slow
@pytest.mark.parametrize("finish", [False, True])
async def test_new_weights_of_one_policy_change_no_bit_of_the_other(finish):
    dtype = await deterministic_dtype()
    models = {"a": scaled(dtype, 1.0), "b": scaled(dtype, 1.5)}
    later = scaled(dtype, 0.5)
    async with engine_of({"a": models["a"]}) as engine:
        alone = (await replies(engine, "a"))["a"]
    async with engine_of(models, finish=finish) as engine:
        playing = asyncio.ensure_future(replies(engine, "a", "b"))
        while engine.load().sampled_tokens < 50:
            await asyncio.sleep(0.001)
        await engine.sync_weights("b", NEW, weights_of(later))
        assert (engine.version("a"), engine.version("b")) == (OLD, NEW)
        during = await playing
        after = await replies(engine, "a", "b")
    assert during["a"] == after["a"] == alone
    seen = [{version for _, _, version in reply} for reply in during["b"]]
    assert seen.count({OLD}) > 0
    if finish:  # all of them had begun
        assert all(versions == {OLD} for versions in seen)
    else:
        assert seen.count({OLD, NEW}) > 0
    async with engine_of({"b": later}) as engine:
        expected = (await replies(engine, "b"))["b"]
    assert [[token[:2] for token in r] for r in after["b"]] == [[token[:2] for token in r] for r in expected]


async def test_prefixes_are_those_of_one_policy_and_are_forgotten_with_its_weights_alone(tiny):
    one = replace(DRAWN, max_tokens=1)
    models = {"a": tiny, "b": scaled(torch.float32, 1.5)}
    async with engine_of(models, deterministic=False) as engine:

        async def computed(policy: str) -> int:
            before = engine.load().prefilled_tokens
            await reply_of(engine, policy, prompt(30), one)
            return engine.load().prefilled_tokens - before

        assert [await computed(policy) for policy in "abab"] == [30, 30, 1, 1]
        await engine.sync_weights("b", NEW, weights_of(models["b"]))
        assert [await computed(policy) for policy in "ab"] == [1, 30]


async def test_a_sync_that_waits_for_its_policy_does_not_wait_for_the_other(tiny):
    models = {"a": tiny, "b": scaled(torch.float32, 1.5)}
    async with engine_of(models, deterministic=False, finish=True) as engine:
        endless = engine.generate(engine_request(prompt(4), FOREVER, "a"))
        await anext(endless)
        await asyncio.wait_for(engine.sync_weights("b", NEW, weights_of(models["b"])), 60)
        waiting = asyncio.ensure_future(engine.sync_weights("a", NEW, weights_of(tiny)))
        again = asyncio.ensure_future(engine.sync_weights("a", PolicyVersion(0, 2), weights_of(tiny)))
        await anext(endless)
        found = await asyncio.wait_for(reply_of(engine, "b", prompt(9), DRAWN), 60)  # `b` is still answered
        assert {version for _, _, version in found} == {NEW}
        assert not waiting.done()
        later = asyncio.ensure_future(reply_of(engine, "a", prompt(9), DRAWN))
        await endless.aclose()
        await asyncio.wait_for(asyncio.gather(waiting, again), 60)
        assert {version for _, _, version in await later} == {PolicyVersion(0, 2)}


async def test_an_error_of_one_policys_model_fails_its_requests_alone(tiny):
    broken = scaled(torch.float32, 1.5)
    real, armed = broken.hidden, asyncio.Event()

    def hidden(*arguments):
        if armed.is_set():
            raise RuntimeError("no good")
        return real(*arguments)

    broken.hidden = hidden
    async with engine_of({"a": tiny, "b": broken}, deterministic=False) as engine:
        streams = {name: engine.generate(engine_request(prompt(4), FOREVER, name)) for name in "ab"}
        for stream in streams.values():
            await anext(stream)
        armed.set()
        with pytest.raises(EngineFailure, match="no good"):
            async for _ in streams["b"]:
                pass
        for _ in range(5):
            await anext(streams["a"])
        armed.clear()
        assert await reply_of(engine, "b", prompt(9), DRAWN)
        await streams["a"].aclose()


async def test_a_policy_that_the_engine_does_not_have_is_an_error(tiny):
    async with engine_of({"a": tiny}, deterministic=False) as engine:
        with pytest.raises(ModelError, match=r"'a'.*not 'b'"):
            await anext(engine.generate(engine_request(prompt(3), DRAWN, "b")))
        with pytest.raises(ModelError, match=r"'a'.*not 'b'"):
            await engine.sync_weights("b", NEW, LocalWeights(()))
