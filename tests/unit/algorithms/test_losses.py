from __future__ import annotations

import math
import random

import pytest
import torch

from palestra.algorithms.loss import LOSSES, LossInputs, LossOutput, LossSpec, ValueInputs, ValueLoss
from palestra.algorithms.losses import (
    CISPOLoss,
    CrossEntropyLoss,
    DROLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    PPOClipLoss,
    build_loss,
)

LOSS = PPOClipLoss(clip_high_threshold=1.28)


def loss_of(logprobs, sampling_logprobs, advantages, old_logprobs=None, on_policy=None, loss=LOSS) -> LossOutput:
    on_policy = torch.ones(len(logprobs), dtype=torch.bool) if on_policy is None else on_policy
    return loss(
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


# The losses of the Tinker API, against its documentation ("Loss functions in Tinker"), which adds up all tokens


def tinker(name, logprobs, sampled, advantages, low=0.8, high=1.2, beta=0.05):
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, low, high)
    return {
        "cross_entropy": -logprobs,
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.min(ratio * advantages, clipped * advantages),
        "cispo": -(clipped.detach() * logprobs * advantages),
        "dro": -(logprobs * advantages - 0.5 * beta * (logprobs - sampled) ** 2),
    }[name].sum()


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (CrossEntropyLoss(), {}),
        (ImportanceSamplingLoss(), {}),
        (PPOClipLoss(), {}),
        (PPOClipLoss(clip_low_threshold=0.9, clip_high_threshold=1.1), {"low": 0.9, "high": 1.1}),
        (CISPOLoss(), {"low": 0.0, "high": 4.0}),
        (CISPOLoss(clip_low_threshold=0.8, clip_high_threshold=1.2), {"low": 0.8, "high": 1.2}),
        (DROLoss(), {}),
        (DROLoss(beta=0.7), {"beta": 0.7}),
    ],
    ids=repr,
)
def test_the_losses_of_tinker_are_those_of_its_documentation(loss, config):
    logprobs, sampled, advantages = tokens(200)
    found, wanted = logprobs.clone().requires_grad_(True), logprobs.clone().requires_grad_(True)
    value = loss_of(found, sampled, advantages, loss=loss).loss.sum()
    expected = tinker(loss.name, wanted, sampled, advantages, **config)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_tinkers_losses_have_its_names_and_defaults():
    defaults = {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
    }
    for name, parameters in defaults.items():
        assert LossSpec.of(build_loss(LossSpec(name=name))) == LossSpec(name=name, parameters=parameters)


@pytest.mark.parametrize("loss", [build_loss(LossSpec(name=name)) for name in sorted(LOSSES)], ids=lambda x: x.name)
def test_each_loss_declares_its_metrics_and_none_of_them_has_a_gradient(loss):
    if isinstance(loss, ValueLoss):
        values = torch.zeros((3, 1), requires_grad=True)
        inputs = ValueInputs(values=values, old_values=torch.zeros(3), returns=torch.tensor([1.0, 0.0, -1.0]))
    else:
        inputs = LossInputs(
            logprobs=torch.zeros(3, requires_grad=True),
            sampling_logprobs=torch.zeros(3),
            old_logprobs=None,
            advantages=torch.tensor([1.0, 0.0, -1.0]),
            on_policy=torch.ones(3, dtype=torch.bool),
            sequence_means=torch.zeros(3) if loss.over_sequences else None,
        )
    found = loss(inputs)
    assert found.loss.shape == (3,)
    assert found.metrics.keys() == {metric.name for metric in loss.metrics}
    assert not any(metric.values.requires_grad for metric in found.metrics.values())


@pytest.mark.parametrize(
    "loss", [PPOClipLoss(), GSPOLoss(), CISPOLoss(), ImportanceSamplingLoss()], ids=lambda x: x.name
)
def test_an_advantage_of_zero_has_no_gradient(loss):
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        sampling_logprobs=torch.tensor([-1.0, -1.0]),
        old_logprobs=None,
        advantages=torch.zeros(2),
        on_policy=torch.ones(2, dtype=torch.bool),
        sequence_means=torch.zeros(2),
    )
    loss(inputs).loss.sum().backward()
    assert not logprobs.grad.any()


def test_gspo_is_its_formula_with_the_gradient_of_the_whole_sequence():
    """Equation 5 of the paper, through which autograd differentiates: s = exp(mean of log ratios)."""
    logprobs, sampled, _ = tokens(12)
    logprobs = sampled + 0.2 * (logprobs - sampled)
    sequences = [slice(0, 5), slice(5, 6), slice(6, 12)]
    advantages = torch.tensor([1.0] * 5 + [-2.0] + [0.5] * 6, dtype=torch.float64)
    wanted = logprobs.clone().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for part in sequences:
        s = (wanted[part] - sampled[part]).mean().exp()
        a = advantages[part][0]
        total = total - torch.min(s * a, s.clamp(0.9, 1.05) * a)
    total.backward()
    found = logprobs.clone().requires_grad_(True)
    means = torch.cat([(logprobs - sampled)[part].mean().expand(part.stop - part.start) for part in sequences])
    weights = torch.cat([torch.full((part.stop - part.start,), 1 / (part.stop - part.start)) for part in sequences])
    inputs = LossInputs(
        logprobs=found,
        sampling_logprobs=sampled,
        old_logprobs=None,
        advantages=advantages,
        on_policy=torch.ones(12, dtype=torch.bool),
        sequence_means=means,
    )
    value = (GSPOLoss(clip_low_threshold=0.9, clip_high_threshold=1.05)(inputs).loss * weights).sum()
    value.backward()
    assert float(value.detach()) == pytest.approx(float(total.detach()), abs=1e-6)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [PPOClipLoss(), GSPOLoss()], ids=lambda x: x.name)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_ratio_that_overflows_has_a_finite_gradient_and_leaves_those_of_others_alone(loss, advantage, gap):
    """exp(100) is infinite in float32, and 0 x infinity, the gradient of the term that is not taken, is NaN."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        sampling_logprobs=torch.tensor([-1.0 - gap, -1.0]),
        old_logprobs=None,
        advantages=torch.tensor([advantage, 1.0]),
        on_policy=torch.ones(2, dtype=torch.bool),
        sequence_means=torch.tensor([gap, 0.0]),
    )
    found = loss(inputs)
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.isfinite(found.metrics["ratio_mean"].values).all()
    assert logprobs.grad.tolist() == [0.0, -1.0]
