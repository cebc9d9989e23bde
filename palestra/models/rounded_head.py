"""The output layer of a model that is trained in bfloat16, whose weights are rounded once a pass.

Scores of all positions do not fit into memory, so a trainer computes them chunk by chunk, forward and backward. Each
chunk would round the largest matrix of a small model again and add a gradient of its size to the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

_ROUNDED = torch.bfloat16
_KEPT_BYTES = 2**27  # of gradients of scores, until the gradient of the weights is computed from them


class RoundedHead:
    """Scores by one layer for several chunks of one pass; its gradient reaches the weights behind those of all chunks.

    It rounds where `nn.Linear` does under autocast; sums over positions are rounded less often.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Round the weights, float32 [V, hidden], of a layer without a bias."""
        self._gradient = _Gradient()
        self._weight: Tensor = _Rounding.apply(head.weight, self._gradient)  # type: ignore[no-untyped-call]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the scores, bfloat16 [M, V], for hidden states [M, hidden]."""
        found: Tensor = _Product.apply(hidden, self._weight, self._gradient)  # type: ignore[no-untyped-call]
        return found


class _Gradient:
    """The gradient of the weights in one backward pass, of which some chunks are not computed yet.

    A pass that fails, or does not ask for the gradient of the weights, leaves a part behind, which the next forgets.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, backward_pass: int | None) -> None:
        """Forget what earlier backward passes have left; None: no pass has begun."""
        self._pass, self._bytes = backward_pass, 0
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._sum: Tensor | None = None

    def add(self, of_scores: Tensor, hidden: Tensor) -> None:
        """Take a chunk's gradient of the scores [M, V] and its hidden states [M, hidden], rounded."""
        if (running := _backward_pass()) != self._pass:
            self._begin(running)
        self._parts.append((of_scores, hidden))
        self._bytes += of_scores.nbytes
        if self._bytes > _KEPT_BYTES:
            self._compute()

    def whole(self) -> Tensor | None:
        """Return the gradient, float32 [V, hidden], and forget it; None: no chunk had one in this pass."""
        found = None
        if self._pass == _backward_pass():
            if self._parts:
                self._compute()
            found = self._sum
        self._begin(None)
        return found

    def _compute(self) -> None:
        of_scores, hidden = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        self._parts.clear()
        self._bytes = 0
        found = (of_scores.t() @ hidden).float()
        self._sum = found if self._sum is None else self._sum.add_(found)


def _backward_pass() -> int:
    """Return a number of the backward pass that is running, as `torch.utils.checkpoint` tells them apart."""
    return torch._C._current_graph_task_id()


class _Context(FunctionCtx):
    """What a forward pass leaves to the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    gradient: _Gradient


class _Rounding(Function):
    """Weights, rounded; autograd asks for their gradient when all chunks have given theirs."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return bfloat16 [V, hidden]."""
        ctx.set_materialize_grads(False)  # chunks return none, in place of one of zeros
        ctx.gradient = gradient
        return weight.to(_ROUNDED)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *_: None) -> tuple[Tensor | None, None]:
        """Return float32 [V, hidden]."""
        return ctx.gradient.whole(), None


class _Product(Function):
    """Scores of a chunk."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return bfloat16 [M, V]."""
        rounded = hidden.to(_ROUNDED)
        ctx.save_for_backward(rounded, weight)
        ctx.gradient = gradient
        return F.linear(rounded, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *of_scores: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the hidden states, float32 [M, hidden]; that of the weights is made later."""
        rounded, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(of_scores[0], rounded)
        return (of_scores[0] @ weight).float(), None, None
