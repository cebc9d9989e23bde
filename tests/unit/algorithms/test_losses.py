from __future__ import annotations

import math
import random

import pytest
import torch

from palestra.algorithms.loss import LossInputs, LossOutput
from palestra.algorithms.losses import PPOClipLoss

LOSS = PPOClipLoss(clip_low=0.2, clip_high=0.28)


def loss_of(logprobs, sampling_logprobs, advantages, old_logprobs=None, on_policy=None) -> LossOutput:
    on_policy = torch.ones(len(logprobs), dtype=torch.bool) if on_policy is None else on_policy
    return LOSS(
        LossInputs(
            logprobs=logprobs,
            sampling_logprobs=sampling_logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            on_policy=on_policy,
        )
    )


def naive(logprob: float, sampled: float, advantage: float) -> tuple[float, float, bool]:
    """PPO's equation 7, case by case: (loss, ratio, clipped)."""
    ratio = math.exp(logprob - sampled)
    if advantage >= 0 and ratio > 1.28:
        return -1.28 * advantage, ratio, advantage > 0
    if advantage < 0 and ratio < 0.8:
        return -0.8 * advantage, ratio, True
    return -ratio * advantage, ratio, False


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = random.Random(0)
    sampled = [-draw.expovariate(1.0) for _ in range(count)]
    logprobs = [b + draw.gauss(0, 0.4) for b in sampled]
    advantages = [draw.choice([-2.0, -0.5, 0.0, 0.5, 2.0]) for _ in range(count)]
    return tuple(torch.tensor(column, dtype=torch.float64) for column in (logprobs, sampled, advantages))


def test_losses_are_those_of_a_naive_implementation():
    logprobs, sampled, advantages = tokens(400)
    found = loss_of(logprobs, sampled, advantages)
    ratio, clipped = (found.metrics[name].values.tolist() for name in ("ratio_mean", "clip_fraction"))
    wanted = [naive(*row) for row in zip(logprobs.tolist(), sampled.tolist(), advantages.tolist(), strict=True)]
    assert found.loss.tolist() == pytest.approx([w[0] for w in wanted], abs=1e-12)
    assert ratio == pytest.approx([w[1] for w in wanted], abs=1e-12)
    assert clipped == [float(w[2]) for w in wanted]
    assert 20 < sum(clipped) < 380


def test_the_gradient_is_that_of_finite_differences():
    logprobs, sampled, advantages = tokens(60)
    ratio = (logprobs - sampled).exp()
    away_from_the_bends = ((ratio - 0.8).abs() > 1e-3) & ((ratio - 1.28).abs() > 1e-3)
    logprobs, sampled, advantages = (t[away_from_the_bends] for t in (logprobs, sampled, advantages))
    assert len(logprobs) > 50
    logprobs.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: loss_of(x, sampled, advantages).loss, (logprobs,), eps=1e-6, atol=1e-6)


def test_on_policy_the_gradient_is_minus_the_advantage():
    advantages = torch.tensor([-1.0, 0.0, 2.5])
    logprobs = torch.tensor([-0.1, -1.0, -5.0], requires_grad=True)
    loss_of(logprobs, logprobs.detach(), advantages).loss.sum().backward()
    assert logprobs.grad.tolist() == (-advantages).tolist()


def test_a_clipped_token_has_no_gradient():
    logprobs = torch.tensor([1.0, -1.0], requires_grad=True)
    found = loss_of(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]))
    found.loss.sum().backward()
    assert found.metrics["clip_fraction"].values.tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_what_is_reported_carries_no_gradient():
    logprobs = torch.zeros(2, requires_grad=True)
    found = loss_of(logprobs, torch.zeros(2), torch.ones(2))
    assert not any(metric.values.requires_grad for metric in found.metrics.values())


def test_the_ratio_is_to_the_policy_before_the_step_where_its_logprobs_are_there():
    logprobs, sampled, advantages = tokens(50)
    old = sampled + 0.1
    wanted, found = loss_of(logprobs, old, advantages), loss_of(logprobs, sampled, advantages, old)
    assert torch.equal(found.loss, wanted.loss)
    assert not torch.equal(found.loss, loss_of(logprobs, sampled, advantages).loss)


def test_clipping_is_also_told_of_the_tokens_that_the_present_policy_sampled():
    on_policy = torch.tensor([True, False])
    found = loss_of(torch.zeros(2), torch.zeros(2), torch.ones(2), on_policy=on_policy)
    assert found.metrics["clip_fraction_on_policy"].over is on_policy


def test_every_metric_is_declared():
    found = loss_of(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert found.metrics.keys() == {metric.name for metric in PPOClipLoss.metrics}
