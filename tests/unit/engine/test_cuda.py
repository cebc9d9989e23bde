"""The same engine on a GPU. Its logprobs are those of the CPU within 0.05 nats in bfloat16, and 1e-3 in float32."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.models.causal_lm import load_causal_lm
from unit.engine.test_embedded import DRAWN, full_forward, prompt, reply

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
async def test_logprobs_are_those_of_the_cpu(reference, dtype, tolerance):
    model = load_causal_lm("tiny-random", dtype, torch.device("cuda"))
    engine = EmbeddedEngine(
        {"policy": PolicyModel(model=model, stop_ids=frozenset())}, EmbeddedEngineConfig(max_batch=16)
    )
    prompts = [prompt(5 + 30 * n, n) for n in range(6)]
    try:
        found = await asyncio.gather(*(reply(engine, p, replace(DRAWN, seed=n)) for n, p in enumerate(prompts)))
        longer = np.concatenate((prompts[-1], np.array(found[-1][0], np.int32)))
        found.append(await reply(engine, longer, DRAWN))  # from the prefix cache
    finally:
        await engine.close()
    for ids, (tokens, logprobs, _) in zip([*prompts, longer], found, strict=True):
        assert np.allclose(logprobs, full_forward(reference, ids, tokens, 1.0), atol=tolerance)
