"""Replies that are sampled while weights are replaced: what the logprob of each token is, at every change of version.

A pass feeds one token to the weights that are loaded at that moment. It leaves that token's keys and values, and gives
the logits of the next token. Keys and values of earlier passes stay as the weights of their time made them. So the
recorded logprob of a token is that of the weights of its recorded version, over a cache which the versions of the
tokens before it have filled. The oracle does the same with transformers' own model and cache, one token at a time.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, SamplingParams
from unit.building import engine_request
from unit.engine.calling import prompt, serving

LONG = 90  # tokens of the replies that are sampled beside the one that the weights change in
Sampled = list[tuple[int, float, int]]  # id, logprob, version


def noisy(model: torch.nn.Module, version: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of a version: the model's own, each moved by a tenth of its size."""
    if version == 0:
        return [(name, p.detach().clone()) for name, p in model.named_parameters()]
    generator = torch.Generator().manual_seed(version)
    return [
        (name, p.detach() + 0.1 * p.detach().std(correction=0) * torch.randn(p.shape, generator=generator))
        for name, p in model.named_parameters()
    ]


def models_of(reference, weights: Sequence[list[tuple[str, torch.Tensor]]]) -> list[torch.nn.Module]:
    """transformers' model with the weights of each version."""
    models = []
    for tensors in weights:
        model = copy.deepcopy(reference)
        with torch.no_grad():
            for (_, parameter), (_, tensor) in zip(model.named_parameters(), tensors, strict=True):
                parameter.copy_(tensor)
        models.append(model)
    return models


@torch.inference_mode()
def one_at_a_time(
    models: Sequence[torch.nn.Module],
    ids: np.ndarray,
    sampled: Sampled,
    temperature: float,
    prefill: Sequence[int] = (),
) -> list[float]:
    """Logprobs of the sampled tokens. `prefill`: versions that read the prompt's tokens; none: the first token's."""
    readers = list(prefill) or [sampled[0][2]] * len(ids)
    cache = DynamicCache()
    for version in dict.fromkeys(readers):
        span = [int(token) for token, reader in zip(ids, readers, strict=True) if reader == version]
        logits = models[version](torch.tensor([span]), past_key_values=cache).logits[0, -1]
    found = []
    for place, (token, _, _) in enumerate(sampled):
        found.append(float((logits.double() / temperature).log_softmax(-1)[token]))
        if place + 1 < len(sampled):
            following = models[sampled[place + 1][2]]
            logits = following(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return found


async def sampled_under(engine, ids, sampling: SamplingParams, publish: Mapping[int, Any], last: int = -1) -> Sampled:
    """A reply; `publish[n]` is called when n tokens of it are there. It is broken off after 15 of version `last`."""
    out: Sampled = []
    async with aclosing(engine.generate(engine_request(ids, sampling))) as pieces:
        async for piece in pieces:
            for token, logprob in zip(piece.ids, piece.logprobs, strict=True):
                out.append((token, logprob, piece.version.n))
                if len(out) in publish:
                    await publish[len(out)]()
            if sum(version == last for _, _, version in out) >= 15:
                break
    return out


def spans(sampled: Sampled) -> list[int]:
    """The versions in the order in which they come."""
    versions = [version for _, _, version in sampled]
    assert versions == sorted(versions)
    return list(dict.fromkeys(versions))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_at_every_change_of_version_a_token_agrees_with_the_weights_of_its_own(tiny, reference, temperature):
    weights = [noisy(tiny, version) for version in range(5)]
    models = models_of(reference, weights)
    asked = [(prompt(20, seed=1), 3), (prompt(33, seed=2), 4), (prompt(7, seed=3), 5)]  # beside one another
    async with serving(tiny, stops=()) as engine:

        def publishing(version: int):
            return lambda: engine.sync_weights("policy", PolicyVersion(0, version), LocalWeights(weights[version]))

        calls = [
            sampled_under(
                engine,
                ids,
                SamplingParams(temperature=temperature, max_tokens=1500 if place == 0 else LONG, seed=seed),
                {15 * version: publishing(version) for version in range(1, 5)} if place == 0 else {},
                last=4,
            )
            for place, (ids, seed) in enumerate(asked)
        ]
        replies = await asyncio.gather(*calls)
    assert spans(replies[0]) == [0, 1, 2, 3, 4]
    for (ids, _), sampled in zip(asked, replies, strict=True):
        assert len(sampled) >= 60
        wanted = one_at_a_time(models, ids, sampled, temperature)
        assert np.abs(np.array([logprob for _, logprob, _ in sampled]) - wanted).max() < 2e-5


async def test_the_oracle_tells_versions_and_caches_apart(tiny, reference):
    """With the weights of any other version, or a cache that the new weights made, the numbers are others."""
    weights = [noisy(tiny, version) for version in range(3)]
    models = models_of(reference, weights)
    ids = prompt(20)
    async with serving(tiny, stops=()) as engine:
        publish = {
            12 * v: lambda v=v: engine.sync_weights("policy", PolicyVersion(0, v), LocalWeights(weights[v]))
            for v in (1, 2)
        }
        sampled = await sampled_under(engine, ids, SamplingParams(temperature=1.0, max_tokens=60, seed=3), publish)
    assert spans(sampled) == [0, 1, 2]
    logprobs = np.array([logprob for _, logprob, _ in sampled])
    for wrong in range(3):
        others = [(token, logprob, wrong) for token, logprob, _ in sampled]
        gap = np.abs(logprobs - one_at_a_time(models, ids, others, 1.0))
        own = np.array([version == wrong for _, _, version in sampled])
        assert gap[~own].max() > 1e-2  # other weights
        if wrong:
            assert gap[own].max() > 1e-3  # the same weights over a cache of their own
    shifted = [(token, p, after[2]) for (token, p, _), after in pairwise([*sampled, sampled[-1]])]
    gap = np.abs(logprobs - one_at_a_time(models, ids, shifted, 1.0))
    assert gap.max() > 1e-3  # a version that changes one token too early


async def test_a_prompt_that_is_read_under_two_versions_keeps_the_keys_of_both(tiny, reference):
    weights = [noisy(tiny, version) for version in range(2)]
    models = models_of(reference, weights)
    ids = prompt(1000)
    async with serving(tiny, stops=(), limits={"PREFILL_TOKENS": 10}) as engine:
        sampling = SamplingParams(temperature=1.0, max_tokens=3, seed=3)
        running = asyncio.ensure_future(sampled_under(engine, ids, sampling, {}))
        while engine.load().prefilled_tokens < 50:
            await asyncio.sleep(0.001)
        await engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(weights[1]))
        begun = engine.load().prefilled_tokens
        sampled = await running
    assert spans(sampled) == [1]
    logprobs = np.array([logprob for _, logprob, _ in sampled])
    gaps = {  # of each place at which the weights may have come: the engine reads ten tokens a pass
        cut: np.abs(logprobs - one_at_a_time(models, ids, sampled, 1.0, [0] * cut + [1] * (1000 - cut))).max()
        for cut in range(50, min(begun, 990) + 1, 10)
    }
    best = min(gaps, key=gaps.__getitem__)
    assert gaps[best] < 2e-5
    assert all(gap > 10 * gaps[best] for cut, gap in gaps.items() if cut != best)
