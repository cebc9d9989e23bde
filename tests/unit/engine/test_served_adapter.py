"""A policy that is an adapter on a server: adapters alone are sent, each version under a name of its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from palestra.config import AdapterConfig
from palestra.errors import ConfigError, EngineFailure, ModelError
from palestra.models.adapter_files import read_adapter
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from unit.building import engine_request
from unit.engine.engine_servers import ScriptedSglang, ScriptedVllm, on_server

PROMPT = np.arange(40, 44, dtype=np.int32)
FIRST, SECOND, THIRD = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)
LORA = AdapterConfig(rank=2, alpha=4)
UPDATES = ("/pause", "/start_weight_update", "/update_weights", "/pause_generation", "/update_weights_from_disk")


def adapter_of(value: float, **changes) -> LocalWeights:
    matrices = {
        "model.q_proj.lora_A.weight": torch.full((2, 4), value),
        "model.q_proj.lora_B.weight": torch.full((6, 2), value),
        "model.down_proj.lora_A.weight": torch.full((2, 6), value),
        "model.down_proj.lora_B.weight": torch.full((4, 2), value),
    }
    return LocalWeights([item for item in (matrices | changes).items() if item[1] is not None])


@pytest.fixture(params=[ScriptedVllm, ScriptedSglang])
def server(request):
    return request.param()


async def reply_of(engine, policy="policy"):
    """The versions of a reply's tokens."""
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    request = engine_request(PROMPT, params, policy)
    return [piece.version async for piece in engine.generate(request) for _ in piece.ids]


def asked_for(body: dict) -> str | None:
    """The adapter that a request names."""
    return body.get("model", body.get("lora_path"))


async def test_requests_are_sampled_from_the_base_until_there_is_an_adapter(server, tmp_path):
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        assert await reply_of(engine) == [FIRST] * 6
        assert asked_for(server.bodies[0]) is None
        await engine.sync_weights("policy", SECOND, adapter_of(0.5))
        assert engine.version("policy") == SECOND
        assert await reply_of(engine) == [SECOND] * 6
        (name,) = server.adapters
        assert asked_for(server.bodies[1]) == name
        assert not [path for path, _ in server.asked if path in UPDATES]  # neither a pause nor whole weights
        (folder,) = (tmp_path / "weights").iterdir()
        read = read_adapter(folder)
        assert (read.config.rank, read.config.alpha) == (2, 4.0)
        assert {name: matrix.tolist() for name, matrix in read.weights.items()} == {
            name: matrix.tolist() for name, matrix in adapter_of(0.5).named
        }
        assert await engine.score("policy", TokenSequence(PROMPT)) != []
    assert not (tmp_path / "weights").exists()


async def test_a_reply_ends_under_the_version_it_began_with_and_that_one_is_unloaded_afterwards(server, tmp_path):
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        await engine.sync_weights("policy", SECOND, adapter_of(0.5))
        server.gate.clear()
        call = asyncio.create_task(reply_of(engine))
        async with asyncio.timeout(5):
            while not server.bodies:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.sync_weights("policy", THIRD, adapter_of(1.5)), 5)  # it waits for no reply
        assert len(server.adapters) == 2
        server.gate.set()
        assert await call == [SECOND] * 6
        assert await reply_of(engine) == [THIRD] * 6
        await engine.sync_weights("policy", PolicyVersion(0, 3), adapter_of(2.5))
        assert [
            float(one["base_model.model.model.q_proj.lora_A.weight"][0, 0]) for one in server.adapters.values()
        ] == [2.5]
        assert len(list((tmp_path / "weights").iterdir())) == 1


async def test_past_versions_are_further_adapters(server, tmp_path):
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        await engine.add_policy("policy@0", "policy", FIRST, None)  # the base, as the policy itself at that time
        await engine.sync_weights("policy", SECOND, adapter_of(0.5))
        await engine.add_policy("policy@1", "policy", SECOND, adapter_of(0.5))
        await engine.add_policy("also@1", "policy", SECOND, None)
        await engine.sync_weights("policy", THIRD, adapter_of(1.5))
        assert await reply_of(engine, "policy@0") == [FIRST] * 6
        assert await reply_of(engine, "policy@1") == [SECOND] * 6
        assert await reply_of(engine, "also@1") == [SECOND] * 6
        assert await reply_of(engine) == [THIRD] * 6
        assert [engine.version(name) for name in ("policy@0", "policy@1", "policy")] == [FIRST, SECOND, THIRD]
        assert asked_for(server.bodies[0]) is None
        assert len({asked_for(body) for body in server.bodies}) == 4
        assert len(server.adapters) == 3
        for name in ("policy@0", "policy@1", "also@1", "unknown"):
            await engine.remove_policy(name)
        assert len(server.adapters) == 1
        with pytest.raises(ModelError, match=r"'policy'.*'policy@1'"):
            await reply_of(engine, "policy@1")


@pytest.mark.parametrize(
    "changes",
    [
        {"model.q_proj.lora_A.weight": torch.ones(3, 4)},
        {"model.q_proj.lora_B.weight": None},
        {"model.other.lora_A.weight": torch.ones(2, 4), "model.other.lora_B.weight": torch.ones(6, 2)},
        {"model.embed_tokens.lora_embedding_A": torch.ones(2, 259)},
    ],
    ids=["rank", "half", "layer", "embedding"],
)
async def test_matrices_that_do_not_fit_never_reach_the_server(server, tmp_path, changes):
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        with pytest.raises(ModelError, match="linear layers"):
            await engine.sync_weights("policy", SECOND, adapter_of(0.5, **changes))
        assert not server.adapters
        assert await reply_of(engine) == [FIRST] * 6


async def test_a_server_that_refuses_an_adapter_has_failed(server, tmp_path):
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        await reply_of(engine)
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            server.answers[path] = (400, {"error": {"message": "LoRA rank 2 is greater than max_lora_rank 1"}})
        failure = asyncio.create_task(engine.failure())
        with pytest.raises(EngineFailure, match=r"2.*greater"):
            await engine.sync_weights("policy", SECOND, adapter_of(0.5))
        assert "while it got version 0.1" in await asyncio.wait_for(failure, 5)


@pytest.mark.parametrize("lora", [None, {"max_lora_rank": 1}, {}])
async def test_a_vllm_server_without_room_for_the_adapter_is_refused(tmp_path, lora):
    server = ScriptedVllm()
    server.info = ScriptedVllm.info | {"lora_config": lora, "weight_transfer_config": None}
    async with on_server(server, tmp_path, adapter=LORA) as engine:
        with pytest.raises(ConfigError, match=r"--enable-lora.*--max-lora-rank.*8.*VLLM_ALLOW_RUNTIME"):
            await reply_of(engine)
