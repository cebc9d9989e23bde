"""How rows are packed, cut into micro-batches and ordered changes no gradient of any loss: 1e-6, in double precision.

In float32 the same sums in another order differ by some 1e-6 of a weight's gradient, so a bound of 1e-6 says nothing
there. Here matrices and sums have 53 bits; what is left is the rounding of the normalisation, which is float32 anyway.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import LOSSES, LossSpec, ValueLoss
from palestra.trainer.packing import pack
from palestra.trainer.token_forward import LOGIT_CHUNK
from unit.trainer.networks import networks
from unit.trainer.test_torch_trainer import batch_of_two_groups, close

EXACT = 1e-6
SHIPPED = {name: kind for name, kind in LOSSES.items() if kind.__module__.startswith("palestra.")}  # not tests' own
POLICY = sorted(name for name, kind in SHIPPED.items() if not issubclass(kind, ValueLoss))
CRITIC = sorted(name for name, kind in SHIPPED.items() if issubclass(kind, ValueLoss))


@asynccontextmanager
async def doubled(**more):
    """A trainer whose networks have weights of 64 bits."""
    async with networks(**more) as trainer:
        policy = trainer._policies["policy"]
        critic = policy._critic
        for name, parameter in [*policy.parameters, *(critic.optimizer.parameters if critic is not None else [])]:
            parameter.data = parameter.data.double()
            if name == "value_head.weight":  # which begins with zeros, and then nothing else has a gradient
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        yield trainer


def batch() -> list:
    """Rows of three episodes with all that a loss reads."""
    draw = np.random.default_rng(3)
    names = ["a", "a", "b", "c", "b", "c"]

    def column(sample, scale: float = 1.0) -> np.ndarray:
        return np.where(sample.loss_mask, draw.normal(0, scale, len(sample.ids)), np.nan).astype(np.float32)

    return [
        replace(
            sample,
            episode_id=name,
            old_logprobs=sample.logprobs + column(sample, 0.1),
            reference_logprobs=sample.logprobs + column(sample, 0.3),
            values=column(sample),
            returns=column(sample),
        )
        for sample, name in zip(batch_of_two_groups(), names, strict=True)
    ]


async def gradient(spec: LossSpec, samples: list, **more) -> dict[str, torch.Tensor]:
    async with doubled(**more) as trainer:
        await trainer.forward_backward("policy", samples, spec, "g")
        policy = trainer._policies["policy"]
        of = policy._critic.optimizer.parameters if "critic" in more else policy.parameters
        return {name: p.grad.clone() for name, p in of if p.grad is not None}


def ways(tokens: int) -> list:
    """The batch in another order, cut into micro-batches of so many tokens."""
    samples = batch()[::-1]
    assert len(pack(samples, tokens)) > 1
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY)
async def test_the_gradient_of_a_policy(name, monkeypatch):
    spec = LossSpec(name=name)
    whole = await gradient(spec, batch())
    for tokens in (1, 20, 40):
        close(await gradient(spec, ways(tokens), micro_batch_tokens=tokens), whole, EXACT)
    monkeypatch.setitem(LOGIT_CHUNK, "cpu", 7)
    close(await gradient(spec, batch()), whole, EXACT)


async def test_the_gradient_of_a_policy_with_penalty_and_bonus():
    spec = LossSpec(name="ppo", kl_coefficient=0.3, entropy_coefficient=0.05)
    whole = await gradient(spec, batch())
    for tokens in (1, 20, 40):
        close(await gradient(spec, ways(tokens), micro_batch_tokens=tokens), whole, EXACT)


@pytest.mark.parametrize("name", CRITIC)
async def test_the_gradient_of_a_critic(name):
    spec, kind = LossSpec(name=name), "replies" if name == "value-gradient" else "states"
    whole = await gradient(spec, batch(), critic=kind)
    for tokens in (1, 20, 40):
        close(await gradient(spec, ways(tokens), critic=kind, micro_batch_tokens=tokens), whole, EXACT)
