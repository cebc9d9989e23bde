"""Engines with the tiny model, and what is asked of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from unittest.mock import patch

import numpy as np
import torch

from palestra.engine.embedded import scheduler
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.types.calls import SampledTokens, SamplingParams
from unit.building import engine_request

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, seed=0)
DRAWN = SamplingParams(temperature=1.0, max_tokens=12, seed=5)
FOREVER = SamplingParams(temperature=1.0, max_tokens=10**7, min_tokens=10**7, seed=1)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


@asynccontextmanager
async def serving(model, stops=(258,), deterministic=False, limits=None, finish=False, **config):
    """An engine of one policy.

    Args:
        limits: constants of the scheduler, in place of its own.
    """
    settings = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32", "max_batch": 16} | config)
    policy = PolicyModel(model=model, stop_ids=frozenset(stops))
    with patch.dict(vars(scheduler), limits or {}):
        engine = EmbeddedEngine({"policy": policy}, settings, deterministic, finish=finish)
        try:
            yield engine
        finally:
            await engine.close()


async def until_it_samples(engine) -> None:
    """Return when a token of any call has been sampled, so that calls are in flight."""
    async with asyncio.timeout(60):
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.001)


async def reply(engine, ids, sampling):
    """(ids, logprobs, versions), token by token."""
    pieces = [piece async for piece in engine.generate(engine_request(ids, sampling))]
    return (
        [i for piece in pieces for i in piece.ids],
        [p for piece in pieces for p in piece.logprobs],
        [piece.version for piece in pieces for _ in piece.ids],
    )


async def all_of(pieces) -> list[SampledTokens]:
    return [piece async for piece in pieces]


def full_forward(reference, ids, completion, temperature) -> list[float]:
    """log softmax(logits / temperature) of each completion token, from one pass of transformers over all of it."""
    whole = torch.tensor([[*ids.tolist(), *completion]])
    with torch.inference_mode():
        logits = reference(whole).logits[0].double() / (temperature or 1.0)
    rows = logits.log_softmax(-1)[len(ids) - 1 : -1]
    return rows[range(len(completion)), completion].tolist()
