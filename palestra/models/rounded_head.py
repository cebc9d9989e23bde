"""The output layer of a model that is trained in bfloat16, whose weights are rounded once a pass.

Scores of all positions do not fit into memory, so a trainer computes them chunk by chunk, forward and backward. Each
chunk would round the largest matrix of a small model again and add a gradient of its size to the others. So would the
embeddings, where the model has them from the same matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functional_call

_ROUNDED = torch.bfloat16
_KEPT_BYTES = 2**27  # of gradients of scores, until the gradient of the weights is computed from them
_ROWS = 4096  # of the gradient of the weights, which are computed at a time


class HeadWeights:
    """The weights of an output layer in one pass, and of the embeddings where both are one matrix.

    A pass computes with `whole`, so that autograd asks for its gradient when scores and embeddings have given theirs.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Take the weights, float32 [V, hidden], of a layer without a bias."""
        self.gradient, self._of = _Gradient(), head.weight
        self.whole: Tensor = _Weights.apply(head.weight, self.gradient)  # type: ignore[no-untyped-call]

    def call(self, model: nn.Module, given: dict[str, Any]) -> Any:
        """Return what a model returns, whose embeddings may have the same weights.

        Then, on a CPU, the gradient of its embeddings is the rows of the tokens alone, and they are added to that of
        the scores. On a GPU, rows of equal tokens would be added in any order.

        Args:
            model: all of the model but the output layer.
        """
        name = self._table_of(model)
        if name is None:
            return model(**given)
        table: Any = model.get_submodule(name)
        before, table.sparse = table.sparse, True
        try:
            return functional_call(model, {f"{name}.weight": self.whole}, (), given)
        finally:
            table.sparse = before

    def _table_of(self, model: nn.Module) -> str | None:
        """Return the name of the embeddings with the same weights; None: their gradient is torch's."""
        if self._of.device.type != "cpu":
            return None
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.weight is self._of:
                return None if module.max_norm is not None or module.scale_grad_by_freq else name
        return None


def is_called_as_it_is(module: nn.Module) -> bool:
    """Return whether nothing listens to a module's calls or has taken the place of its `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not any(hooks) and "forward" not in vars(module)


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
        vocabulary = of_scores[0].shape[1]
        if first := self._sum is None:
            self._sum = torch.empty(vocabulary, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        # By blocks, because the gradients of all scores a second time would be the largest memory of a pass.
        for rows in (slice(start, start + _ROWS) for start in range(0, vocabulary, _ROWS)):
            found = torch.cat([part[:, rows] for part in of_scores]).t() @ hidden
            if first:
                self._sum[rows].copy_(found)
            else:
                self._sum[rows].add_(found)
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
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, of_rows: Tensor | None) -> tuple[Tensor | None, None]:
        """Return float32 [V, hidden], with that of embeddings, dense where their module chooses so."""
        found = ctx.gradient.whole()
        if of_rows is None:
            return found, None
        if found is None:
            return of_rows.to_dense() if of_rows.is_sparse else of_rows, None
        if not of_rows.is_sparse:
            return found.add_(of_rows), None
        return found.index_add_(0, of_rows._indices()[0], of_rows._values()), None


class _Rounding(Function):
    """Weights, rounded; all chunks have given their gradients when autograd asks for that of the weights."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return bfloat16 [V, hidden]."""
        ctx.set_materialize_grads(False)  # chunks return none, in place of one of zeros
        ctx.gradient = gradient
        return weight.to(_ROUNDED)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, _: None) -> tuple[None, None]:
        """Compute the gradient here, so that those of scores take no memory for the rest of the pass."""
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
