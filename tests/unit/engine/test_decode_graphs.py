"""Decoding passes that are recorded once and run again, with a recorder that computes again instead of a GPU's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.engine.embedded.decode_graphs import DecodeGraphs
from palestra.engine.embedded.kv_cache import KVCache, wide_capacity_for
from palestra.errors import EngineFailure
from palestra.models.causal_lm import load_causal_lm
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion
from unit.building import engine_request
from unit.engine.calling import DRAWN, FOREVER, all_of, prompt, reply, serving, until_it_samples
from unit.engine.test_shared_base import engine_of

LONG = replace(DRAWN, max_tokens=40, min_tokens=40)
MIB = 2**20


class Recorder:
    """Computes again into the same tensor, as a CUDA graph does."""

    def __init__(self) -> None:
        self.recorded = self.run = 0
        self.error: Exception | None = None

    def __call__(self, compute):
        if self.error is not None:
            raise self.error
        found = compute().clone()
        self.recorded += 1

        def again() -> None:
            self.run += 1
            with torch.inference_mode():
                found.copy_(compute())

        return found, again


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(
        "palestra.engine.embedded.model_runner.graphs_for", lambda device: DecodeGraphs(made, kept_bytes=64 * MIB)
    )
    return made


@pytest.fixture(scope="module")
def model():
    return load_causal_lm("tiny-random", torch.float32)


async def many(engine):
    """Replies of prompts of many lengths, which begin and end at different times and outgrow their buckets."""
    lengths = (3, 200, 250, 30, 255, 256, 600)
    calls = [(prompt(length, n), replace(LONG, seed=n, max_tokens=20 + 5 * n)) for n, length in enumerate(lengths)]
    found = await asyncio.gather(*(reply(engine, ids, sampling) for ids, sampling in calls))
    return [*found, await reply(engine, prompt(40, 9), LONG)]


async def test_passes_that_are_run_again_give_the_same_replies(model, recorder, monkeypatch):
    async with serving(model) as engine:
        found = await many(engine)
        passes = engine.load().passes
    monkeypatch.undo()
    async with serving(model) as engine:
        wanted = await many(engine)
    for (ids, logprobs, _), (right, other, _) in zip(found, wanted, strict=True):
        assert ids == right
        assert np.allclose(logprobs, other, atol=1e-5)
    assert 0 < recorder.recorded < 12  # for each capacity and number of places
    assert recorder.run > 40
    assert passes >= recorder.run


async def test_new_weights_are_those_of_the_next_token(recorder):
    model = load_causal_lm("tiny-random", torch.float32)
    draw = torch.Generator().manual_seed(5)
    new = LocalWeights([(n, 0.1 * torch.randn(p.shape, generator=draw)) for n, p in model.own_weights()])
    async with serving(model) as engine:
        before = await reply(engine, prompt(9), LONG)
        await engine.sync_weights("policy", PolicyVersion(1, 0), new)
        recorded = recorder.recorded
        after = await reply(engine, prompt(9), LONG)
    assert recorder.recorded == recorded  # the bucket stays, and its record with it
    async with serving(load_causal_lm("tiny-random", torch.float32)) as engine:
        await engine.sync_weights("policy", PolicyVersion(1, 0), new)
        assert (await reply(engine, prompt(9), LONG))[0] == after[0]
    assert before[0] != after[0]


async def test_rows_of_several_adapters_take_the_usual_way_and_one_alone_is_recorded(recorder):
    async with engine_of("a", "b", deterministic=False) as engine:
        alone = {name: await all_of(engine.generate(engine_request(prompt(7), LONG, name))) for name in "ab"}
        recorded, run = recorder.recorded, recorder.run
        assert recorded == 2
        both = await asyncio.gather(*(all_of(engine.generate(engine_request(prompt(7), LONG, name))) for name in "ab"))
    assert [piece.ids for piece in both[0]] == [piece.ids for piece in alone["a"]]
    assert [piece.ids for piece in both[1]] == [piece.ids for piece in alone["b"]]
    assert recorder.run < run + 10  # they are hardly ever alone
    assert alone["a"] != alone["b"]


async def test_a_policy_that_comes_back_under_its_name_is_recorded_with_its_own_weights(recorder):
    """Its bucket stays, for another reply is in it; the record of the one before would read memory that is freed."""
    async with engine_of("a", "b", deterministic=False) as engine, asyncio.timeout(60):
        other = engine.generate(engine_request(prompt(9, 1), FOREVER, "b"))
        await anext(other)
        (bucket,) = engine._core.policies["b"].runner._cache._buckets.values()
        bucket.captured["a"] = "a record of a pass with weights that are freed"
        await engine.remove_policy("a")
        assert set(bucket.captured) <= {"b"}
        await other.aclose()
        await engine.add_policy("a", "b", PolicyVersion(2, 0), None)
        found = await all_of(engine.generate(engine_request(prompt(7), LONG, "a")))
        wanted = await all_of(engine.generate(engine_request(prompt(7), LONG, "b")))
    assert [piece.ids for piece in found] == [piece.ids for piece in wanted]


async def test_a_model_that_can_not_be_recorded_is_served_all_the_same(model, recorder, caplog):
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    async with serving(model) as engine:
        found = await reply(engine, prompt(9), LONG)
        again = await reply(engine, prompt(9), LONG)
    assert found[0] == again[0]
    assert len(found[0]) == 40
    assert [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()] == [
        "decoding passes can't be recorded as CUDA graphs, and take longer: operation not permitted when stream is "
        "capturing"
    ]


async def test_a_call_that_nobody_waits_for_leaves_no_row(model, recorder):
    async with serving(model) as engine:
        pieces = engine.generate(engine_request(prompt(9), FOREVER))
        await anext(pieces)
        await until_it_samples(engine)
        await pieces.aclose()
        found = await reply(engine, prompt(9), LONG)
    async with serving(model) as engine:
        assert (await reply(engine, prompt(9), LONG))[0] == found[0]


async def test_what_is_kept_without_rows_is_freed_where_memory_runs_out(model, recorder):
    async with serving(model) as engine:
        before = await reply(engine, prompt(9), LONG)
        (policy,) = engine._core.policies.values()
        (kept,) = policy.runner._cache._buckets.values()
        assert kept.captured
        recorder.error = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(EngineFailure, match="of memory"):
            await reply(engine, prompt(600), LONG)  # in a larger bucket, whose pass is not recorded yet
        assert policy.runner._cache._buckets == {}
        recorder.error = None
        assert (await reply(engine, prompt(9), LONG))[0] == before[0]
        assert kept not in policy.runner._cache._buckets.values()


def test_buckets_without_rows_stay_while_they_are_small():
    kept = KVCache(2, 1, 4, torch.float32, torch.device("cpu"), wide_capacity_for, kept_bytes=10**5)
    small, large = (torch.ones((2, 2, 1, length, 4)) for length in (10, 3000))
    row = kept.insert(small)
    bucket = row.bucket
    bucket.captured["policy"] = "a record"
    kept.remove(row)
    assert kept.in_order() == []
    assert kept.insert(small).bucket is bucket
    assert bucket.captured
    for _ in range(4):
        kept.insert(small)  # one more than there are places
    assert not bucket.captured
    kept.remove(kept.insert(large))
    assert kept.in_order() == [bucket]
    assert len(kept._buckets) == 1  # the large one is gone


@pytest.mark.parametrize(("length", "capacity"), [(1, 256), (256, 256), (257, 512), (513, 1024), (5000, 8192)])
def test_wide_capacities_are_powers_of_two(length, capacity):
    assert wide_capacity_for(length) == capacity
