"""LoRA adapters against PEFT's own forward pass."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.config import EngineConfig
from palestra.errors import ModelError
from palestra.inference.adapters import Adapter
from palestra.inference.embedded import EmbeddedEngine
from palestra.models.catalog import model_folder
from palestra.schemas.records import PolicyVersion
from unit.inference.test_embedded import DRAWN, full_forward, prompt

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of PEFT and transformers
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def peft_model(folder, seed: int, **settings):
    """A tiny model with an adapter of random weights, as PEFT has it; the adapter is saved in `folder`."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder("tiny-random"), dtype=torch.float32)
    how = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(base, peft.LoraConfig(**how)).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def engine_with(tiny, adapters, **config) -> EmbeddedEngine:
    settings = EngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 16} | config)
    return EmbeddedEngine(tiny, "policy", (258,), settings, adapters=adapters)


async def reply(engine, policy, ids, sampling):
    pieces = [piece async for piece in engine.generate(policy, ids, sampling)]
    return [piece.ids[0] for piece in pieces], [piece.logprobs[0] for piece in pieces], pieces[-1].version


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "r": 9}, {"alpha_pattern": {"q_proj": 2}}], ids=str)
async def test_rows_of_several_policies_in_one_batch_each_get_their_adapter(tmp_path, tiny, reference, settings):
    models = {name: peft_model(tmp_path / name, seed, **settings) for seed, name in enumerate(("a", "b"))}
    engine = engine_with(tiny, {name: Adapter.load(tmp_path / name) for name in models})
    try:
        asked = [(policy, prompt(9 + n, n)) for n, policy in enumerate(("a", "policy", "b", "a", "policy", "b"))]
        found = await asyncio.gather(*(reply(engine, policy, ids, DRAWN) for policy, ids in asked))
    finally:
        await engine.close()
    for (policy, ids), (tokens, logprobs, _) in zip(asked, found, strict=True):
        own = models.get(policy, reference)
        assert np.allclose(logprobs, full_forward(own, ids, tokens, 1.0), atol=1e-3)
        other = models["b" if policy == "a" else "a"]
        assert not np.allclose(logprobs, full_forward(other, ids, tokens, 1.0), atol=1e-2)


async def test_an_adapter_is_updated_alone_and_its_prefixes_are_forgotten(tmp_path, tiny):
    peft_model(tmp_path / "a", 0)
    after = peft_model(tmp_path / "b", 1)
    engine = engine_with(tiny, {"a": Adapter.load(tmp_path / "a")})
    weights = {f"base_model.model.{layer}": pair for layer, pair in Adapter.load(tmp_path / "b").pairs.items()}
    named = [(f"{n}.lora_{x}.weight", t) for n, pair in weights.items() for x, t in zip("AB", pair, strict=True)]
    try:
        await reply(engine, "a", prompt(20), DRAWN)
        await engine.update_weights("a", PolicyVersion(0, 3), named)
        before = engine.prefilled_tokens
        ids, logprobs, version = await reply(engine, "a", prompt(20), DRAWN)
        assert engine.prefilled_tokens - before == 20
        assert (version, engine.version("policy")) == (PolicyVersion(0, 3), PolicyVersion(0, 0))
        with pytest.raises(ModelError, match="only one of A and B"):
            await engine.update_weights("a", PolicyVersion(0, 4), named[:-1])
        assert engine.version("a") == PolicyVersion(0, 3)
    finally:
        await engine.close()
    assert np.allclose(logprobs, full_forward(after, prompt(20), ids, 1.0), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "biases"), ({"peft_type": "IA3"}, "plain LoRA")],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, change, why):
    peft_model(tmp_path, 0)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=why):
        Adapter.load(tmp_path)


def test_an_adapter_that_does_not_fit_or_is_not_there_is_refused(tmp_path, tiny):
    with pytest.raises(ModelError, match="can't be read"):
        Adapter.load(tmp_path / "nowhere")
    peft_model(tmp_path, 0)
    adapter = Adapter.load(tmp_path)
    layer = next(iter(adapter.pairs))
    a, b = adapter.pairs[layer]
    for pairs, why in (({"model.layers.9.q": (a, b)}, "inner linear"), ({layer: (a[:, 1:], b)}, "wrong shape")):
        with pytest.raises(ModelError, match=why):
            engine_with(tiny, {"a": replace(adapter, pairs=pairs)})
    with pytest.raises(ModelError, match="bit by bit"):
        EmbeddedEngine(tiny, "policy", (258,), EngineConfig(threads=1), deterministic=True, adapters={"a": adapter})
