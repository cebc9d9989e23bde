"""Policies that are adapters on one base are decoded in one batch, and each answers as it would alone, bit for bit."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from palestra.config import AdapterConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.errors import EngineFailure, ModelError
from palestra.models.loading import LoadedModels
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion
from unit.building import engine_request
from unit.engine.calling import DRAWN, FOREVER, prompt
from unit.engine.test_embedded import deterministic_dtype
from unit.engine.test_two_policies import CALLS, NEW, OLD, replies, reply_of

CPU = torch.device("cpu")
TINY = "tiny-random"
CONFIGS = {
    "a": AdapterConfig(rank=4, alpha=8.0),
    "b": AdapterConfig(rank=13, alpha=30.0, targets=["q_proj", "down_proj"]),
    "c": AdapterConfig(rank=1, alpha=4.0),
    "d": AdapterConfig(rank=4, alpha=8.0),
    "bare": None,
}


def adapted(models: LoadedModels, name: str, dtype: torch.dtype):
    """A policy's model, with an adapter that changes a lot; or the base alone."""
    if CONFIGS[name] is None:
        return models.frozen(TINY, dtype, CPU)[0]
    model, _ = models.adapted(TINY, CONFIGS[name], None, dtype, CPU)
    for (_, parameter), (_, drawn) in zip(model.own_parameters(), weights_of(model, ord(name)).tensors(), strict=True):
        parameter.copy_(drawn)
    return model


def weights_of(model, seed: int) -> LocalWeights:
    draw = torch.Generator().manual_seed(seed)
    return LocalWeights([(n, 0.2 * torch.randn(p.shape, generator=draw)) for n, p in model.own_parameters()])


def policy(model) -> PolicyModel:
    return PolicyModel(model=model, stop_ids=frozenset((258,)))


@asynccontextmanager
async def engine_of(*names: str, dtype=torch.float32, deterministic: bool = True, models=None, **config):
    settings = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 40} | config)
    models = models or LoadedModels()
    engine = EmbeddedEngine({n: policy(adapted(models, n, dtype)) for n in names}, settings, deterministic)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.slow
async def test_each_adapter_answers_as_it_would_alone_bit_by_bit():
    dtype = await deterministic_dtype()
    async with engine_of(*CONFIGS, dtype=dtype) as engine:
        together = await replies(engine, *CONFIGS)
        mixed = engine.load()
        fewer = await replies(engine, "bare", "c")
    for name in CONFIGS:
        async with engine_of(name, dtype=dtype) as engine:
            assert (await replies(engine, name))[name] == together[name]
            passes = engine.load().passes
    assert fewer == {name: together[name] for name in ("c", "bare")}
    assert len({str(reply) for reply in together.values()}) == 5
    # One pass for each prompt, which are whole and alone, and then all of them together.
    assert mixed.passes < passes + 4 * len(CALLS) + 20


@pytest.mark.slow
async def test_a_neighbour_that_is_killed_updated_or_removed_changes_no_bit():
    dtype = await deterministic_dtype()
    async with engine_of("a", dtype=dtype) as engine:
        alone = (await replies(engine, "a"))["a"]
    async with engine_of(*CONFIGS, dtype=dtype) as engine:
        endless = {n: engine.generate(engine_request(prompt(8, 3), FOREVER, n)) for n in "bcd"}
        for stream in endless.values():
            await anext(stream)
        playing = asyncio.ensure_future(replies(engine, "a"))
        start = engine.load().sampled_tokens
        while engine.load().sampled_tokens < start + 100:
            await anext(endless["c"])
        await engine.sync_weights("c", NEW, weights_of(adapted(LoadedModels(), "c", dtype), 5))
        await endless["b"].aclose()
        while engine.load().sampled_tokens < start + 300:
            await anext(endless["c"])
        await engine.remove_policy("d")
        assert (await playing)["a"] == alone
        with pytest.raises(EngineFailure, match=r"d.*removed"):
            async for _ in endless["d"]:
                pass
        assert (await anext(endless["c"])).version in (OLD, NEW)
        await endless["c"].aclose()
        assert (await replies(engine, "a"))["a"] == alone


async def test_one_batch_takes_as_many_passes_as_one_policy():
    calls = [("a", prompt(20, 1), replace(DRAWN, max_tokens=50, min_tokens=50))]
    passes = []
    for names in (["a"], ["a", "b", "c", "d"]):
        async with engine_of(*names, deterministic=False) as engine:
            await asyncio.gather(*(reply_of(engine, name, *calls[0][1:]) for name in names))
            passes.append(engine.load().passes)
    assert passes[1] <= passes[0] + 3  # where requests come one by one; without a common batch it is four times as many


async def test_a_mixed_batch_samples_from_the_distributions_of_each_policy():
    greedy = replace(DRAWN, temperature=0.0, max_tokens=6, min_tokens=6)
    async with engine_of(*CONFIGS, deterministic=False) as engine:
        names = list(CONFIGS)
        mixed = await asyncio.gather(*(reply_of(engine, name, prompt(30), greedy) for name in names))
    for name, found in zip(names, mixed, strict=True):
        async with engine_of(name, deterministic=False) as engine:
            alone = await reply_of(engine, name, prompt(30), greedy)
        assert [token[0] for token in found] == [token[0] for token in alone]
        assert [token[1] for token in found] == pytest.approx([token[1] for token in alone], abs=1e-4)


async def test_prefixes_are_those_of_one_adapter():
    one = replace(DRAWN, max_tokens=1)
    async with engine_of("a", "b", "bare", deterministic=False) as engine:

        async def computed(name: str) -> int:
            before = engine.load().prefilled_tokens
            await reply_of(engine, name, prompt(30), one)
            return engine.load().prefilled_tokens - before

        names = ["a", "b", "bare", "a", "b", "bare"]
        assert [await computed(name) for name in names] == [30, 30, 30, 1, 1, 1]
        model = adapted(LoadedModels(), "b", torch.float32)
        await engine.sync_weights("b", NEW, weights_of(model, 9))
        assert [await computed(name) for name in names] == [1, 30, 1, 1, 1, 1]


@pytest.mark.slow
async def test_an_adapter_of_another_rank_joins_a_running_engine():
    dtype = await deterministic_dtype()
    async with engine_of("b", dtype=dtype) as engine:
        alone = (await replies(engine, "b"))["b"]
    models = LoadedModels()
    settings = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 40})
    engine = EmbeddedEngine({"a": policy(adapted(models, "a", dtype))}, settings, True)
    try:
        playing = asyncio.ensure_future(replies(engine, "a"))
        await engine.add_model("b", policy(adapted(models, "b", dtype)), PolicyVersion(0, 0))
        assert (await replies(engine, "b"))["b"] == alone
        await playing
        with pytest.raises(ModelError, match=r"policy.*'b'"):
            await engine.add_model("b", policy(adapted(models, "b", dtype)), PolicyVersion(0, 0))
        assert len({one.runner for one in engine._core.policies.values()}) == 1
    finally:
        await engine.close()


@pytest.mark.slow
async def test_an_adapter_that_is_removed_frees_its_memory_at_once_and_the_base_stays():
    models, dtype = LoadedModels(), torch.float32
    async with engine_of("a", dtype=dtype, deterministic=False, models=models) as engine:
        wanted = (await replies(engine, "a"))["a"]
        other = adapted(models, "b", dtype)
        await engine.add_model("b", policy(other), PolicyVersion(0, 0))
        await engine.remove_policy("b")
        assert other.adapter is not None
        assert sum(weight.numel() for _, weight in other.adapter.named_parameters()) == 0
        found = (await replies(engine, "a"))["a"]  # prompts are known now, so that other shapes are computed
    for reply, before in zip(found, wanted, strict=True):
        assert [token[0] for token in reply] == [token[0] for token in before]
        assert [token[1] for token in reply] == pytest.approx([token[1] for token in before], abs=1e-4)
