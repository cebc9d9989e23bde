"""Log-probabilities and entropies from the logits of the whole vocabulary, with few passes over them.

Logits are the largest tensors of a step, [T, V], and memory traffic takes longer than the arithmetic. Autograd would
make a tensor of their size for each operation, forward and backward; here each direction makes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


@dataclass(slots=True)
class Measured:
    """Results of the first pass over logits, reused when they are recomputed.

    Attributes:
        totals: [T, 1], logsumexp of the logits; None: not computed yet.
        entropies: [T], without gradient; None: not computed yet.
    """

    totals: Tensor | None = None
    entropies: Tensor | None = None


def token_logprobs(scores: Tensor, target: Tensor, measured: Measured | None = None) -> Tensor:
    """Return the log-probabilities [T] of the targets, with gradient.

    Args:
        scores: float32 [T, V], finite.
        measured: results for the same logits, entropies included; filled if empty. None: not kept.
    """
    found: Tensor = _Logprobs.apply(scores, target, measured)  # type: ignore[no-untyped-call]
    return found


def token_logprobs_and_entropies(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets and the entropies, [T] each, both with gradient.

    Args:
        scores: float32 [T, V], finite.
    """
    found: tuple[Tensor, Tensor] = _LogprobsAndEntropies.apply(scores, target)  # type: ignore[no-untyped-call]
    return found


class _Context(FunctionCtx):
    """What a forward pass leaves to the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _Logprobs(Function):
    @staticmethod
    def forward(ctx: _Context, scores: Tensor, target: Tensor, measured: Measured | None) -> Tensor:
        """Return log-probabilities [T]."""
        total = None if measured is None else measured.totals
        if total is None:
            parts, mass, total = _parts(scores)
            if measured is not None:
                measured.totals = total
                measured.entropies = (total - parts.mul_(scores).sum(dim=1, keepdim=True) / mass).squeeze(1)
        ctx.save_for_backward(scores, target, total)
        return _chosen(scores, target, total)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient [T, V] of the scores: (chosen - p) times that of the log-probability."""
        scores, target, total = ctx.saved_tensors
        of_logprob = gradients[0].unsqueeze(1)
        found = (scores - total).exp_().mul_(-of_logprob)
        return found.scatter_add_(1, target.unsqueeze(1), of_logprob), None, None


class _LogprobsAndEntropies(Function):
    @staticmethod
    def forward(ctx: _Context, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [T] each."""
        parts, mass, total = _parts(scores)
        mean = parts.mul_(scores).sum(dim=1, keepdim=True) / mass  # of the scores
        ctx.save_for_backward(scores, target, total, mean)
        return _chosen(scores, target, total), (total - mean).squeeze(1)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient [T, V] of the scores: that of the entropy is -p (score - mean score)."""
        scores, target, total, mean = ctx.saved_tensors
        of_logprob, of_entropy = (gradient.unsqueeze(1) for gradient in gradients)
        found = (scores - mean).mul_(-of_entropy).sub_(of_logprob).mul_((scores - total).exp_())
        return found.scatter_add_(1, target.unsqueeze(1), of_logprob), None


def _parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - max) [T, V], its sums [T, 1], and the logsumexp of the scores [T, 1]."""
    top = scores.amax(dim=1, keepdim=True)
    parts = (scores - top).exp_()
    mass = parts.sum(dim=1, keepdim=True)
    return parts, mass, top + mass.log()


def _chosen(scores: Tensor, target: Tensor, total: Tensor) -> Tensor:
    return (scores.gather(1, target.unsqueeze(1)) - total).squeeze(1)
