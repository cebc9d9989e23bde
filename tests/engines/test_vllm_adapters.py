"""The real vLLM with a policy that is an adapter: what is sampled, against matrices that are added by hand."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM
from unit.building import engine_request

from engines.models import STOPS, served, started, write_model
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560), pytest.mark.asyncio(loop_scope="module")]
PROMPT = np.arange(40, 52, dtype=np.int32)
VERSIONS = [PolicyVersion(0, number) for number in range(4)]
RANK, SCALE = 4, 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def drawn(model, seed: int) -> dict[str, torch.Tensor]:
    """The matrices of an adapter of all linear layers that changes what a model says."""
    found, draw = {}, torch.Generator().manual_seed(seed)
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            out, width = layer.weight.shape
            found[f"{name}.lora_A.weight"] = torch.randn(RANK, width, generator=draw) * 0.2
            found[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.2
    return found


def adapted(model, matrices):
    """The model with the products added to its weights."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in made.named_modules():
            if name.endswith(TARGETS):
                layer.weight += SCALE * matrices[f"{name}.lora_B.weight"] @ matrices[f"{name}.lora_A.weight"]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def models(folder):
    """What each version should sample from: the base, and the base with each of three adapters."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [base, *(adapted(base, drawn(base, seed)) for seed in range(3))]


@pytest.fixture(scope="module")
def adapters(models):
    """The adapter of each version; None: the base."""
    return [None, *(LocalWeights(list(drawn(models[0], seed).items())) for seed in range(3))]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder, tmp_path_factory):
    policy = {"adapter": {"rank": RANK, "alpha": RANK * SCALE}}
    async with started(folder, tmp_path_factory.mktemp("run"), policy) as found:
        yield found


async def reply(engine, policy="policy", prompt=PROMPT, tokens=30):
    params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=1)
    pieces = [piece async for piece in engine.generate(engine_request(prompt, params, policy))]
    ids = [token for piece in pieces for token in piece.ids]
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return ids, logprobs, {piece.version for piece in pieces}


def expected(model, ids, prompt=PROMPT) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt.tolist(), *ids]])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, STOPS] = -torch.inf
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


async def test_replies_are_of_the_base_and_then_of_each_adapter(engine, models, adapters):
    for version, model, adapter in zip(VERSIONS, models, adapters, strict=True):
        if adapter is not None:
            await engine.sync_weights("policy", version, adapter)
        ids, logprobs, versions = await reply(engine)
        assert versions == {version}
        assert logprobs == pytest.approx(expected(model, ids), abs=3e-3)
        for other in models:
            if other is not model:
                assert logprobs != pytest.approx(expected(other, ids), abs=0.05)
    prompt = np.arange(60, 90, dtype=np.int32)
    found = await engine.score("policy", TokenSequence(prompt))
    with torch.no_grad():
        rows = models[-1](torch.tensor(prompt[None].astype(np.int64))).logits[0, :-1].double().log_softmax(-1)
    assert found == pytest.approx(rows[range(29), prompt[1:].tolist()].tolist(), abs=3e-3)


async def test_an_update_in_flight_leaves_each_reply_its_version(engine, models, adapters):
    await engine.sync_weights("policy", VERSIONS[1], adapters[1])
    before = engine.load().sampled_tokens
    calls = [asyncio.create_task(reply(engine, prompt=PROMPT + k, tokens=300)) for k in range(4)]
    while engine.load().sampled_tokens < before + 40:
        await asyncio.sleep(0.01)
    await engine.sync_weights("policy", VERSIONS[2], adapters[2])
    assert not any(call.done() for call in calls)
    ids, logprobs, versions = await reply(engine)
    assert versions == {VERSIONS[2]}
    assert logprobs == pytest.approx(expected(models[2], ids), abs=3e-3)
    for k, (ids, logprobs, versions) in enumerate(await asyncio.gather(*calls)):
        assert versions == {VERSIONS[1]}
        assert logprobs == pytest.approx(expected(models[1], ids, PROMPT + k), abs=3e-3)


async def test_a_paused_engine_takes_an_adapter_and_past_versions_stay(engine, models, adapters):
    await engine.pause()
    await engine.add_policy("policy@1", "policy", VERSIONS[1], adapters[1])
    await engine.sync_weights("policy", VERSIONS[3], adapters[3])
    await engine.resume()
    for name, number in (("policy@1", 1), ("policy", 3), ("policy@1", 1)):
        ids, logprobs, versions = await reply(engine, name)
        assert versions == {VERSIONS[number]}
        assert logprobs == pytest.approx(expected(models[number], ids), abs=3e-3)
    await engine.remove_policy("policy@1")
    said = await served(engine).api._http.get("/v1/models", 10)
    assert len(said["data"]) == 2  # the base, and one adapter
