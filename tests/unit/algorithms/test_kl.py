"""The divergence of two distributions by enumeration, and the coefficient that follows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.algorithms.loss import KLCoefficient, kl_terms, row_terms
from unit.building import make_sample


def gaussian_logits(seed: int, size: int = 50) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_()


def number(value: torch.Tensor) -> float:
    return float(value.detach())


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of logits, by enumeration."""
    p, q = p.log_softmax(0), q.log_softmax(0)
    return (p.exp() * (p - q)).sum()


def expected(p: torch.Tensor, q: torch.Tensor, estimator: str) -> torch.Tensor:
    """The mean of an estimator's terms over tokens of p; only the terms have a gradient, as in a loss of samples."""
    log_p = p.log_softmax(0)
    terms = kl_terms(log_p - q.log_softmax(0).detach(), estimator, torch.expm1)
    return (log_p.exp().detach() * terms).sum()


@pytest.mark.parametrize("seed", range(5))
def test_the_means_of_k1_and_k3_are_the_divergence_and_k2_is_near_it_for_near_policies(seed):
    p, q = gaussian_logits(seed), gaussian_logits(seed + 100)
    exact = number(divergence(p, q))
    assert number(expected(p, q, "k1")) == pytest.approx(exact, rel=1e-9)
    assert number(expected(p, q, "k3")) == pytest.approx(exact, rel=1e-9)
    near = p.detach() + 0.01 * q.detach()
    assert number(expected(p, near, "k2")) == pytest.approx(number(divergence(p, near)), rel=0.02)


def gradient(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, of)[0]


@pytest.mark.parametrize("seed", range(5))
def test_as_a_loss_k2_has_the_gradient_of_the_divergence_k3_of_the_reverse_one_and_k1_none(seed):
    p, q = gaussian_logits(seed), gaussian_logits(seed + 100)
    torch.testing.assert_close(gradient(expected(p, q, "k2"), p), gradient(divergence(p, q), p), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(gradient(expected(p, q, "k3"), p), gradient(divergence(q, p), p), atol=1e-12, rtol=1e-9)
    assert float(gradient(expected(p, q, "k1"), p).abs().max()) < 1e-15


def test_terms_of_rows_are_those_of_their_trained_tokens_at_sampling():
    row = make_sample([1, 2, 3, 4], [2, 3], logprobs=[-1.0, -2.0])
    reference = np.array([np.nan, np.nan, -1.5, -1.0], np.float32)
    for estimator, wanted in (
        ("k1", [0.5, -1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [np.exp(-0.5) - 0.5, np.exp(1.0) - 2.0]),
    ):
        (found,) = row_terms([row], [reference], estimator)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, [0, 0, *wanted], rtol=1e-6)


def test_a_term_is_finite_however_far_the_policies_are():
    far = torch.tensor([-1000.0, 1000.0])
    assert torch.isfinite(kl_terms(far, "k3", torch.expm1)).all()
    assert np.isfinite(kl_terms(far.numpy(), "k3")).all()


def test_an_adaptive_coefficient_follows_ziegler():
    """Written out: e = clip(KL / target - 1, -0.2, 0.2), coefficient x (1 + 0.1 e)."""
    one = KLCoefficient(0.5, target=2.0)
    wanted = 0.5
    for measured, error in ((2.2, 0.1), (100.0, 0.2), (2.0, 0.0), (0.0, -0.2), (1.9, -0.05), (float("nan"), 0.0)):
        one.adapt(measured)
        wanted *= 1 + 0.1 * error
        assert one.value == pytest.approx(wanted)


def test_a_fixed_coefficient_stays():
    one = KLCoefficient(0.5)
    one.adapt(100.0)
    assert one.value == 0.5
