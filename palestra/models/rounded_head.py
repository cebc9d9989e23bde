"""The output layer of a model that is trained in bfloat16, whose weights are rounded once a pass.

Scores of all positions do not fit into memory, so a trainer computes them chunk by chunk, forward and backward. Each
chunk would round the largest matrix of a small model again and add a gradient of its size to the others. So would the
embeddings, where the model has them from the same matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functional_call

_ROUNDED = torch.bfloat16
_KEPT_BYTES = 2**27  # of gradients of scores, until the gradient of the weights is computed from them
_TOKENS = 4096  # whose weights' gradient is computed at a time


class HeadWeights:
    """The weights of an output layer in one pass, and of the embeddings where both are one matrix.

    Made before the first layer, because autograd asks last for the gradient of what was made first.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Take the weights, float32 [V, hidden], of a layer without a bias."""
        self.gradient, self._of = _Gradient(), head.weight
        self.whole: Tensor = _Weights.apply(head.weight, self.gradient)  # type: ignore[no-untyped-call]

    def embeddings(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, [N, hidden], by a layer that may have the same weights.

        Then, on a CPU, their gradient is rows of these tokens alone, which are added to that of the scores; on a
        GPU, rows of equal tokens would be added in any order.

        Args:
            embedding: the layer, with its hooks.
            ids: [N].
        """
        if embedding.weight is not self._of or ids.device.type != "cpu":
            found: Tensor = embedding(ids)
            return found
        embedding.sparse = True
        try:
            tied: Tensor = functional_call(embedding, {"weight": self.whole}, (ids,))
        finally:
            embedding.sparse = False
        return tied


class RoundedHead:
    """Scores by one layer for several chunks of one pass; its gradient reaches the weights behind those of all chunks.

    It rounds where `nn.Linear` does under autocast; sums over positions are rounded less often.
    """

    def __init__(self, weights: HeadWeights) -> None:
        """Round the weights of a layer."""
        self._gradient = weights.gradient
        self._weight: Tensor = _Rounding.apply(weights.whole, self._gradient)  # type: ignore[no-untyped-call]

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
        self.finish()
        found = self._sum
        self._begin(None)
        return found

    def finish(self) -> None:
        """Compute what chunks of this pass have left, and forget what earlier passes have."""
        if self._pass != _backward_pass():
            self._begin(None)
        elif self._parts:
            self._compute()

    def _compute(self) -> None:
        """Add the gradient of the chunks that are kept, and forget them."""
        of_scores = [part for part, _ in self._parts]
        hidden = torch.cat([part for _, part in self._parts])
        tokens = of_scores[0].shape[1]
        if first := self._sum is None:
            self._sum = torch.empty(tokens, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for start in range(
            0, tokens, _TOKENS
        ):  # the scores of all chunks a second time would be the pass's largest memory
            of_tokens = torch.cat([part[:, start : start + _TOKENS] for part in of_scores])
            block, found = self._sum[start : start + _TOKENS], of_tokens.t() @ hidden
            if first:
                block.copy_(found)
            else:
                block.add_(found)
        self._parts.clear()
        self._bytes = 0


def _backward_pass() -> int:
    """Return a number of the backward pass that is running, as `torch.utils.checkpoint` tells them apart."""
    return torch._C._current_graph_task_id()


class _Context(FunctionCtx):
    """What a forward pass leaves to the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    gradient: _Gradient


class _Weights(Function):
    """Weights; autograd asks for their gradient when all chunks and the embeddings have given theirs."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return them as they are, float32 [V, hidden]."""
        ctx.set_materialize_grads(False)  # chunks return none, in place of one of zeros
        ctx.gradient = gradient
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, of_rows: Tensor | None) -> tuple[Tensor | None, None]:
        """Return float32 [V, hidden], with `of_rows`, the sparse gradient of embeddings."""
        found = ctx.gradient.whole()
        if of_rows is None:
            return found, None
        if found is None:
            return of_rows.to_dense(), None
        return found.index_add_(0, of_rows._indices()[0], of_rows._values()), None


class _Rounding(Function):
    """Weights, rounded; all chunks have given their gradients when autograd asks for that of the weights."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return bfloat16 [V, hidden]."""
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return weight.to(_ROUNDED)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, _: None) -> tuple[None, None]:
        """Compute the gradient, and leave it to the weights themselves."""
        ctx.gradient.finish()
        return None, None


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
