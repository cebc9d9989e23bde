"""Log-probabilities and entropies with a gradient of their own, against torch's distributions and its autograd."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from palestra.trainer.token_forward import Measured, token_logprobs, token_logprobs_and_entropies


def drawn(tokens: int, vocabulary: int, spread: float):
    draw = torch.Generator().manual_seed(tokens * vocabulary)
    scores = torch.randn(tokens, vocabulary, generator=draw, dtype=torch.float64) * spread
    target = torch.randint(0, vocabulary, (tokens,), generator=draw)
    weights = torch.randn(2, tokens, generator=draw, dtype=torch.float64)
    return scores.requires_grad_(), target, weights


def oracle(scores, target, weights):
    """Log-probabilities, entropies, and the gradients of their weighted sums."""
    found = Categorical(logits=scores)
    logprobs, entropies = found.log_prob(target), found.entropy()
    (of_logprobs,) = torch.autograd.grad((logprobs * weights[0]).sum(), scores, retain_graph=True)
    (of_both,) = torch.autograd.grad((logprobs * weights[0] + entropies * weights[1]).sum(), scores)
    return logprobs, entropies, of_logprobs, of_both


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (1, 7), (5, 300)])
def test_values_and_gradients_are_those_of_torch(tokens, vocabulary, spread):
    scores, target, weights = drawn(tokens, vocabulary, spread)
    wanted = oracle(scores, target, weights)
    kept = Measured()
    alone = token_logprobs(scores, target, kept)
    torch.testing.assert_close(alone, wanted[0])
    torch.testing.assert_close(kept.entropies, wanted[1])
    assert not kept.entropies.requires_grad
    torch.testing.assert_close(torch.autograd.grad((alone * weights[0]).sum(), scores)[0], wanted[2])
    logprobs, entropies = token_logprobs_and_entropies(scores, target)
    torch.testing.assert_close(logprobs, wanted[0])
    torch.testing.assert_close(entropies, wanted[1])
    both = (logprobs * weights[0] + entropies * weights[1]).sum()
    torch.testing.assert_close(torch.autograd.grad(both, scores)[0], wanted[3])


def test_autograd_finds_the_same_by_differences():
    scores, target, _ = drawn(3, 5, 1.0)
    assert torch.autograd.gradcheck(lambda given: token_logprobs(given, target), scores)
    assert torch.autograd.gradcheck(lambda given: token_logprobs_and_entropies(given, target), scores)


@pytest.mark.parametrize("chosen", [0, 1])
def test_tokens_that_can_not_be_sampled_have_no_part_in_anything(chosen):
    """As where a grammar leaves one token: no entropy, no gradient, and nothing that is not a number."""
    scores = torch.tensor([[0.3, -1e9, -1e9]], requires_grad=True)
    logprobs, entropies = token_logprobs_and_entropies(scores, torch.tensor([chosen]))
    (logprobs + entropies).sum().backward()
    assert entropies.item() == 0
    assert logprobs.item() == (0 if chosen == 0 else pytest.approx(-1e9))
    assert scores.grad is not None
    assert scores.grad[0].tolist() == ([0, 0, 0] if chosen == 0 else [-1, 1, 0])


def test_distributions_are_measured_once_where_scores_are_computed_again():
    scores, target, weights = drawn(4, 9, 1.0)
    wanted = oracle(scores, target, weights)
    kept = Measured()
    found = torch.utils.checkpoint.checkpoint(
        lambda given: token_logprobs(given * 1, target, kept), scores, use_reentrant=False
    )
    first = kept.totals
    (found * weights[0]).sum().backward()
    assert kept.totals is first
    torch.testing.assert_close(kept.entropies, wanted[1])
    torch.testing.assert_close(scores.grad, wanted[2])
