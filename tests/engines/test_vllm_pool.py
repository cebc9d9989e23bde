"""Real vLLM servers as the workers of a pool, alone and beside embedded workers; one of them is killed."""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from unit.building import engine_request

from engines.models import STOPS, started, vllm_python, write_model
from palestra.config import parse_config
from palestra.errors import ReplyLost
from palestra.models.weights import LocalWeights
from palestra.runtime.parts import pooled_parts
from palestra.types.calls import PolicyVersion, SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560)]
PROMPT = np.arange(40, 52, dtype=np.int32)
FIRST, SECOND, THIRD = (PolicyVersion(0, number) for number in range(3))


def weights_of(model) -> LocalWeights:
    return LocalWeights([(name, parameter.detach().clone()) for name, parameter in model.named_parameters()])


def changed(model) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)


async def reply(engine, seed: int, tokens: int):
    params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=seed)
    pieces = [piece async for piece in engine.generate(engine_request(PROMPT, params))]
    ids = [token for piece in pieces for token in piece.ids]
    return ids, [one for piece in pieces for one in piece.logprobs], [p.version for p in pieces for _ in p.ids]


async def whole_reply(engine, seed: int, tokens: int):
    """What a session gets, which asks again where a worker of another kind has gone on with other tokens."""
    try:
        return await reply(engine, seed, tokens)
    except ReplyLost:
        return await reply(engine, seed, tokens)


def expected(model, ids) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT.tolist(), *ids]])).logits[0, len(PROMPT) - 1 : -1].double()
    logits[:, STOPS] = -torch.inf
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


async def test_calls_of_a_server_that_is_killed_end_at_the_other_and_its_successor_has_the_present_weights(tmp_path):
    model = write_model(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # On a busy machine a pass of a server may take a minute.
    async with started(model, tmp_path / "run", replicas=2, threads=1, seeds=True, stuck_seconds=240.0) as pool:
        changed(reference)
        await pool.sync_weights("policy", SECOND, weights_of(reference))
        calls = [asyncio.create_task(reply(pool, seed, 400)) for seed in range(6)]
        while pool.load().sampled_tokens < 120:
            await asyncio.sleep(0.01)
        hurt = pool.load().workers[0]
        assert hurt.requests > 0
        children = psutil.Process(hurt.process).children(recursive=True)
        max(children, key=lambda one: one.memory_info().rss).kill()  # the process that computes
        for ids, logprobs, versions in await asyncio.wait_for(asyncio.gather(*calls), 200):
            assert len(ids) == 400
            assert set(versions) == {SECOND}
            assert logprobs == pytest.approx(expected(reference, ids), abs=3e-3)
        assert pool.load().sampled_tokens == 2400
        async with asyncio.timeout(200):
            while any(worker.state != "ready" for worker in pool.load().workers):
                await asyncio.sleep(0.1)
        assert [worker.restarts for worker in pool.load().workers] == [1, 0]
        for ids, logprobs, versions in await asyncio.gather(*(reply(pool, seed, 30) for seed in range(6))):
            assert set(versions) == {SECOND}
            assert logprobs == pytest.approx(expected(reference, ids), abs=3e-3)
        assert all(worker.versions == {"policy": str(SECOND)} for worker in pool.load().workers)
        changed(reference)
        await pool.sync_weights("policy", THIRD, weights_of(reference))
        for ids, logprobs, versions in await asyncio.gather(*(reply(pool, seed, 30) for seed in range(6))):
            assert set(versions) == {THIRD}
            assert logprobs == pytest.approx(expected(reference, ids), abs=3e-3)


async def test_embedded_workers_and_vllm_are_one_pool_with_the_same_weights_of_which_each_does_what_it_can(tmp_path):
    model = write_model(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    common = {"threads": 1, "dtype": "float32", "max_batch": 16}
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "policies": {"policy": {"model": str(model), "max_context": 2048}},
            "engine": {
                "workers": [common | {"kind": "embedded"}, common | {"kind": "vllm", "python": str(vllm_python())}],
                "stuck_seconds": 240.0,
            },
        }
    )
    parts = await pooled_parts(config, {})
    pool = parts.engine

    def sampled() -> list[int]:
        return [worker.own_load.sampled_tokens for worker in pool._workers]

    async def check(version: PolicyVersion) -> None:
        for ids, logprobs, versions in await asyncio.gather(*(reply(pool, seed, 30) for seed in range(8))):
            assert set(versions) == {version}
            assert logprobs == pytest.approx(expected(reference, ids), abs=3e-3)

    try:
        await check(FIRST)
        await asyncio.sleep(1.0)  # a worker's process says a little later what it has done
        assert all(tokens > 0 for tokens in sampled())
        changed(reference)
        await pool.sync_weights("policy", SECOND, weights_of(reference))
        await check(SECOND)
        before = sampled()
        cold = SamplingParams(temperature=0.005, max_tokens=20, min_tokens=20, seed=1)  # which vLLM would raise
        for _ in range(4):
            assert len([piece async for piece in pool.generate(engine_request(PROMPT, cold))]) == 20
        assert sampled()[1] == before[1]
        hurt = pool.load().workers[1]
        assert hurt.name == "inference worker 1 (vllm)"
        calls = [asyncio.create_task(whole_reply(pool, seed, 200)) for seed in range(6)]
        while not pool.load().workers[1].requests:
            await asyncio.sleep(0.01)
        children = psutil.Process(hurt.process).children(recursive=True)
        max(children, key=lambda one: one.memory_info().rss).kill()  # the process that computes
        for ids, logprobs, versions in await asyncio.wait_for(asyncio.gather(*calls), 200):
            assert (len(ids), set(versions)) == (200, {SECOND})
            assert logprobs == pytest.approx(expected(reference, ids), abs=3e-3)
        async with asyncio.timeout(200):
            while any(worker.state != "ready" for worker in pool.load().workers):
                await asyncio.sleep(0.1)
        await check(SECOND)
    finally:
        await pool.close()
        await parts.trainer.close()
