"""What every engine promises, whatever is behind it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from bases import served
from unit.building import engine_request
from unit.engine.engine_servers import ScriptedSglang, ScriptedVllm, on_server

from palestra.config import TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.engine.fake import FakeEngine, digits_script
from palestra.engine.pool.manager import InferenceManager
from palestra.engine.pool.options import PoolOptions
from palestra.engine.pool.worker import StartedWorker
from palestra.errors import EngineFailure
from palestra.models.causal_lm import load_causal_lm
from palestra.models.kept_weights import WeightKeeper
from palestra.models.weights import LocalWeights
from palestra.trainer.base import PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra_bases.base import SamplerSpec

pytestmark = pytest.mark.ci

PROMPT = np.arange(40, 52, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=10, seed=3)


def embedded() -> tuple[EmbeddedEngine, LocalWeights]:
    """An engine of a real model, and other weights of it."""
    model = load_causal_lm("tiny-random", torch.float32)
    policy = PolicyModel(model=model, stop_ids=frozenset((258,)))
    made = EmbeddedEngine({"policy": policy}, EmbeddedEngineConfig(threads=1, dtype="float32"))
    return made, doubled(model)


def doubled(model) -> LocalWeights:
    """Other weights of a model."""
    return LocalWeights([(name, p.detach() * 2) for name, p in model.named_parameters()])


@asynccontextmanager
async def pool(start, keep):
    """An InferenceManager over two workers in this process."""

    async def started(number: int) -> StartedWorker:
        made = start()
        return StartedWorker(made, lambda: None)

    async def kept(policy, source):
        return keep(source)

    made = InferenceManager(started, ["policy"], kept, PoolOptions(replicas=2))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@dataclass(frozen=True)
class Kept:
    """Weights that stay as they are."""

    source: LocalWeights


@asynccontextmanager
async def made_kit(kind: str, folder):
    """An engine, and the weights that its trainer would hand over."""
    alone, _, where = kind.partition(" ")
    if alone in ("vLLM", "SGLang"):
        server = ScriptedVllm() if alone == "vLLM" else ScriptedSglang()
        server.logprob = server.score  # as a server whose replies and scores are of one model
        server.seconds = 0.002
        async with on_server(server, folder) as made:
            yield made, LocalWeights([("model.norm.weight", torch.arange(4.0))])
        return
    if where == "in a pool":
        if alone == "fake":
            async with pool(lambda: FakeEngine(digits_script(12, 258)), Kept) as made:
                yield made, LocalWeights(())
        else:
            async with pool(lambda: embedded()[0], WeightKeeper("float32").keep) as made:
                yield made, doubled(load_causal_lm("tiny-random", torch.float32))
        return
    if alone == "fake":
        made, weights = FakeEngine(digits_script(12, 258)), LocalWeights(())
        trainer = FakeTrainer(2)
    else:
        made, weights = embedded()
        trainer = TorchTrainer(TrainerConfig(threads=1, dtype="float32"), 2)
    if not where:
        yield made, weights
    else:
        async with served(made, trainer, folder) as base:
            engine, remote = await base.job()
            await engine.sample("policy", SamplerSpec(model="tiny-random"))
            await remote.create("policy", PolicySpec(model="tiny-random"))
            yield engine, await remote.weights("policy")
    await made.close()
    await trainer.close()


KINDS = [
    "fake",
    "embedded",
    "fake over a socket",
    "embedded over a socket",
    "fake in a pool",
    "embedded in a pool",
    "vLLM",
    "SGLang",
]


@pytest.fixture(params=KINDS)
async def kit(request, tmp_path):
    torch.set_num_threads(1)
    async with made_kit(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def engine(kit):
    return kit[0]


@pytest.fixture
def weights(kit):
    return kit[1]


async def pieces_of(engine, sampling=SAMPLING, prompt=PROMPT):
    return [piece async for piece in engine.generate(engine_request(prompt, sampling))]


async def test_a_reply_has_a_logprob_and_a_version_for_every_token(engine):
    pieces = await pieces_of(engine)
    assert pieces
    for piece in pieces:
        assert len(piece.ids) == len(piece.logprobs)
        assert all(p <= 0 for p in piece.logprobs)
        assert all(isinstance(i, int) for i in piece.ids)
        assert piece.version == engine.version("policy")


async def test_a_reply_is_never_longer_than_max_tokens_and_stops_at_a_stop_token(engine):
    for seed in range(20):
        ids = [i for p in await pieces_of(engine, replace(SAMPLING, seed=seed, max_tokens=3)) for i in p.ids]
        assert 1 <= len(ids) <= 3
        assert 258 not in ids[:-1]


async def test_equal_calls_have_equal_replies_also_side_by_side(engine):
    alone = [await pieces_of(engine, replace(SAMPLING, seed=s)) for s in range(6)]
    together = await asyncio.gather(*(pieces_of(engine, replace(SAMPLING, seed=s)) for s in range(6)))
    assert [[p.ids for p in reply] for reply in together] == [[p.ids for p in reply] for reply in alone]


async def test_while_paused_no_call_is_answered(engine):
    await engine.pause()
    call = asyncio.ensure_future(pieces_of(engine))
    await asyncio.sleep(0.02)
    assert not call.done()
    await engine.resume()
    assert await asyncio.wait_for(call, 60)


async def test_weights_can_be_replaced_while_paused_and_count_from_then_on(engine, weights):
    await engine.pause()
    call = asyncio.ensure_future(pieces_of(engine))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(engine.sync_weights("policy", PolicyVersion(1, 4), weights), 60)
    await engine.resume()
    assert {p.version for p in await call} == {PolicyVersion(1, 4)}
    assert engine.version("policy") == PolicyVersion(1, 4)


async def test_a_call_that_is_left_does_not_hold_up_the_next(engine):
    reply = engine.generate(engine_request(PROMPT, SAMPLING))
    await anext(reply)
    await reply.aclose()
    assert await asyncio.wait_for(pieces_of(engine), 60)


async def test_a_call_that_is_cancelled_while_it_waits_leaves_nothing(engine):
    await engine.pause()
    call = asyncio.ensure_future(pieces_of(engine))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.resume()
    assert await asyncio.wait_for(pieces_of(engine), 60)


async def test_closing_while_paused_fails_the_calls_that_wait(engine):
    await engine.pause()
    call = asyncio.ensure_future(pieces_of(engine))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(engine.close(), 60)
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(call, 60)


async def test_an_engine_says_what_it_has_to_do_and_what_it_has_done(engine):
    assert (engine.load().waiting, engine.load().running, engine.load().sampled_tokens) == (0, 0, 0)
    await engine.pause()
    calls = [asyncio.ensure_future(pieces_of(engine, replace(SAMPLING, seed=s))) for s in range(3)]
    async with asyncio.timeout(60):
        while engine.load().waiting < 3:
            await asyncio.sleep(0.001)
    await engine.resume()
    sampled = sum(len(piece.ids) for reply in await asyncio.gather(*calls) for piece in reply)
    async with asyncio.timeout(60):
        while engine.load().running:  # a reply is delivered before its place is free
            await asyncio.sleep(0.001)
    load = engine.load()
    assert (load.waiting, load.running, load.sampled_tokens) == (0, 0, sampled)
    assert load.kv_bytes_used <= load.kv_bytes


async def test_the_score_of_a_prompt_is_a_logprob_of_each_token_but_the_first(engine):
    assert await engine.score("policy", TokenSequence(PROMPT[:1])) == []
    found = await engine.score("policy", TokenSequence(PROMPT))
    assert len(found) == len(PROMPT) - 1
    assert all(value <= 0 for value in found)
    assert await engine.score("policy", TokenSequence(PROMPT)) == found
    reply = [token for piece in await pieces_of(engine) for token in piece.ids]
    whole = np.concatenate([PROMPT, np.array(reply, np.int32)])
    sampled = [value for piece in await pieces_of(engine) for value in piece.logprobs]
    scored = (await engine.score("policy", TokenSequence(whole)))[len(PROMPT) - 1 :]
    assert scored == pytest.approx(sampled, abs=1e-4)  # they were sampled at temperature 1, among all tokens
