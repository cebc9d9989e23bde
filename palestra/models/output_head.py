"""The output layer: logits in which the largest are exact, and masks of the tokens that may follow.

The weights of a model trained in bfloat16 are rounded once per pass.
Logits of all positions do not fit into memory, so a trainer computes them in chunks, forward and backward. Otherwise
each chunk, and tied embeddings, would round the largest matrix of a small model again and add a gradient of its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functional_call

# A logit of 16 to 32 is rounded to a multiple of 1/8 in bfloat16, which moves logprobs as far as all layers do. A head
# in float32 (MiniMax 2025, "MiniMax-M1", section 3.2) would make decoding on a CPU a fifth slower; computing the logits
# of the most probable tokens again costs 4 % (64 would cost 8 %), and has all but the tail of the distribution.
EXACT_LOGITS = 16
_BLOCK = 64  # tokens whose largest logit is found first
_EXACT_ROWS = 64  # positions whose weights of the head, [rows, EXACT_LOGITS, hidden], exist at the same time


class AdaptedHead(Protocol):
    """An output layer with weights [V, hidden] and low-rank products."""

    weight: nn.Parameter

    def products_at(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the low-rank products of rows `x`, [M, hidden], at tokens, int64 [M, K]: float32 [M, K]."""
        ...


def is_adapted(head: object) -> TypeGuard[AdaptedHead]:
    """Return whether an output layer has low-rank products.

    `isinstance` does not work: from Python 3.12 on it does not see a module's parameters.
    """
    return hasattr(head, "products_at")


class Correction(NamedTuple):
    """Corrections that make the largest logits of each row exact.

    Attributes:
        tokens: int64 [M, K].
        lacking: float32 [M, K], added to their logits.
    """

    tokens: Tensor
    lacking: Tensor


def sharpened(
    logits: Tensor,
    hidden: Tensor,
    head: nn.Linear | AdaptedHead,
    dtype: torch.dtype,
    corrections: list[Correction] | None = None,
) -> Tensor:
    """Replace the largest logits of each row, in place, by float32 products with the rounded weights.

    Logits are [M, V], hidden states [M, hidden], the head's weights [V, hidden], rounded to `dtype` for these logits.
    `corrections` are filled on the first call, and reused when the same logits are recomputed.
    """
    found = corrections[0] if corrections else _correction(logits, hidden, head, dtype)
    if corrections is not None and not corrections:
        corrections.append(found)
    return logits.scatter_add_(1, *found)


def _correction(logits: Tensor, hidden: Tensor, head: nn.Linear | AdaptedHead, dtype: torch.dtype) -> Correction:
    """Return the corrections of the largest logits; see `sharpened`."""
    bias = getattr(head, "bias", None)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        largest = _largest(logits)
        pieces = []
        for rows, tokens in zip(
            torch.split(hidden.float(), _EXACT_ROWS), torch.split(largest, _EXACT_ROWS), strict=True
        ):
            exact = (head.weight[tokens].to(dtype).float() * rows.unsqueeze(1)).sum(dim=-1)
            pieces.append(exact if bias is None else exact + bias[tokens].float())
        lacking = torch.cat(pieces) - logits.gather(1, largest) if pieces else logits.new_zeros(largest.shape)
        if is_adapted(head) and pieces:
            lacking += head.products_at(hidden.to(dtype), largest)
    return Correction(largest, lacking)


def _largest(logits: Tensor) -> Tensor:
    """Return the tokens of the largest logits of each row, int64 [M, K], from the blocks with the largest maxima."""
    rows, size = logits.shape
    whole, count = size // _BLOCK, min(EXACT_LOGITS, size)
    if whole <= count:
        return logits.topk(count, dim=-1).indices
    maxima = logits[:, : whole * _BLOCK].view(rows, whole, _BLOCK).amax(dim=-1)
    best = maxima.topk(count, dim=-1).indices
    tokens = (best.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    if whole * _BLOCK < size:  # the tokens behind the last block
        rest = torch.arange(whole * _BLOCK, size, device=logits.device).expand(rows, -1)
        tokens = torch.cat((tokens, rest), dim=1)
    return tokens.gather(1, logits.gather(1, tokens).topk(count, dim=-1).indices)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Return a bool [..., V] mask for packed bits, int32 [..., B] with B = ceil(V / 32). Bit i of word w is token 32 *
    w + i.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]


def mask_bits(mask: bytes) -> Tensor:
    """Return the bytes of a mask as an int32 [B] tensor with B = ceil(V / 32)."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)


_ROUNDED = torch.bfloat16
_KEPT_BYTES = 2**27  # of gradients of scores, until the gradient of the weights is computed from them
_ROWS = 4096  # of the gradient of the weights, which are computed at a time


class HeadWeights:
    """An output layer's weights in one pass, and those of tied embeddings.

    A pass computes with `whole`, so that autograd asks for its gradient only after logits and embeddings have added
    theirs.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Take the float32 weights [V, hidden] of a layer without a bias."""
        self.gradient, self._of = _Gradient(), head.weight
        self.whole: Tensor = _Weights.apply(head.weight, self.gradient)  # type: ignore[no-untyped-call]

    def call(self, model: nn.Module, given: dict[str, Any]) -> Any:
        """Call a model whose embeddings may have the same weights.

        On a CPU, the embeddings' gradient is then only the rows of the tokens, added to the logits' gradient. On a GPU
        the order of adding equal tokens would be undefined.
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
        """Return the name of tied embeddings; None: torch computes their gradient."""
        if self._of.device.type != "cpu":
            return None
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.weight is self._of:
                return None if module.max_norm is not None or module.scale_grad_by_freq else name
        return None


def is_called_as_it_is(module: nn.Module) -> bool:
    """Return whether a module has neither hooks nor a replaced `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not any(hooks) and "forward" not in vars(module)


class RoundedHead:
    """Logits by one layer for several chunks of a pass; the weights' gradient comes after those of all chunks.

    It rounds where `nn.Linear` does under autocast, but rounds sums over positions less often.
    """

    def __init__(self, weights: HeadWeights) -> None:
        self._gradient = weights.gradient
        self._weight: Tensor = _Rounding.apply(weights.whole, self._gradient)  # type: ignore[no-untyped-call]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits, bfloat16 [M, V], of hidden states [M, hidden]."""
        found: Tensor = _Product.apply(hidden, self._weight, self._gradient)  # type: ignore[no-untyped-call]
        return found


class _Gradient:
    """The weights' gradient in one backward pass, with chunks still to be computed.

    A pass that fails, or needs no gradient of the weights, leaves chunks behind, which the next pass drops.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, backward_pass: int | None) -> None:
        """Drop what earlier backward passes left; None: no pass has begun."""
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
        """Return and drop the gradient, float32 [V, hidden]; None: no chunk of this pass had one."""
        self.finish()
        found = self._sum
        self._begin(None)
        return found

    def finish(self) -> None:
        """Compute this pass's remaining chunks, and drop those of earlier passes."""
        if self._pass != _backward_pass():
            self._begin(None)
        elif self._parts:
            self._compute()

    def _compute(self) -> None:
        """Add the gradient of the stored chunks, and drop them."""
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
    """Values that the forward pass saves for the backward pass."""

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
        """Return float32 [V, hidden], including the embeddings' gradient, dense where their module chooses so."""
        found = ctx.gradient.whole()
        if of_rows is None:
            return found, None
        if found is None:
            return of_rows.to_dense() if of_rows.is_sparse else of_rows, None
        if not of_rows.is_sparse:
            return found.add_(of_rows), None
        return found.index_add_(0, of_rows._indices()[0], of_rows._values()), None


class _Rounding(Function):
    """Rounded weights; autograd asks for their gradient after that of all chunks."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, gradient: _Gradient) -> Tensor:
        """Return bfloat16 [V, hidden]."""
        ctx.set_materialize_grads(False)  # chunks return none, in place of one of zeros
        ctx.gradient = gradient
        return weight.to(_ROUNDED)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, _: None) -> tuple[None, None]:
        """Compute the gradient here, so that the logits' gradients are freed early."""
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
        """Return the gradient of the hidden states, float32 [M, hidden]; the weights' gradient comes later."""
        rounded, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(of_scores[0], rounded)
        return (of_scores[0] @ weight).float(), None, None
