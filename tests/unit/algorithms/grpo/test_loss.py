from __future__ import annotations

import math
import random

import pytest
import torch

from palestra.algorithms.grpo import ClippedSurrogate

LOSS = ClippedSurrogate(clip_low=0.2, clip_high=0.28)


def naive(logprob: float, behaviour: float, advantage: float) -> tuple[float, float, bool]:
    """PPO's equation 7, case by case: (loss, ratio, clipped)."""
    ratio = math.exp(logprob - behaviour)
    if advantage >= 0 and ratio > 1.28:
        return -1.28 * advantage, ratio, advantage > 0
    if advantage < 0 and ratio < 0.8:
        return -0.8 * advantage, ratio, True
    return -ratio * advantage, ratio, False


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = random.Random(0)
    behaviour = [-draw.expovariate(1.0) for _ in range(count)]
    logprobs = [b + draw.gauss(0, 0.4) for b in behaviour]
    advantages = [draw.choice([-2.0, -0.5, 0.0, 0.5, 2.0]) for _ in range(count)]
    return tuple(torch.tensor(column, dtype=torch.float64) for column in (logprobs, behaviour, advantages))


def test_losses_are_those_of_a_naive_implementation():
    logprobs, behaviour, advantages = tokens(400)
    losses, report = LOSS(logprobs, behaviour, advantages)
    wanted = [naive(*row) for row in zip(logprobs.tolist(), behaviour.tolist(), advantages.tolist(), strict=True)]
    assert losses.tolist() == pytest.approx([w[0] for w in wanted], abs=1e-12)
    assert report["ratio"].tolist() == pytest.approx([w[1] for w in wanted], abs=1e-12)
    assert report["clipped"].tolist() == [float(w[2]) for w in wanted]
    assert 20 < sum(report["clipped"].tolist()) < 380


def test_the_gradient_is_that_of_finite_differences():
    logprobs, behaviour, advantages = tokens(60)
    ratio = (logprobs - behaviour).exp()
    away_from_the_bends = ((ratio - 0.8).abs() > 1e-3) & ((ratio - 1.28).abs() > 1e-3)
    logprobs, behaviour, advantages = (t[away_from_the_bends] for t in (logprobs, behaviour, advantages))
    assert len(logprobs) > 50
    logprobs.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: LOSS(x, behaviour, advantages)[0], (logprobs,), eps=1e-6, atol=1e-6)


def test_on_policy_the_gradient_is_minus_the_advantage():
    advantages = torch.tensor([-1.0, 0.0, 2.5])
    logprobs = torch.tensor([-0.1, -1.0, -5.0], requires_grad=True)
    LOSS(logprobs, logprobs.detach(), advantages)[0].sum().backward()
    assert logprobs.grad.tolist() == (-advantages).tolist()


def test_a_clipped_token_has_no_gradient():
    logprobs = torch.tensor([1.0, -1.0], requires_grad=True)
    losses, report = LOSS(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]))
    losses.sum().backward()
    assert report["clipped"].tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_what_is_reported_carries_no_gradient():
    logprobs = torch.zeros(2, requires_grad=True)
    _, report = LOSS(logprobs, torch.zeros(2), torch.ones(2))
    assert not any(values.requires_grad for values in report.values())
