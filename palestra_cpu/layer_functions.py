"""The two halves of a Llama layer as functions with their own gradients, for bfloat16 on a CPU.

They round where transformers' modules do under autocast; sums may be in another order, because matrices with the same
input are one product, and because of `CpuKernels`. For the backward pass they save the streams and the products, and
recompute rounded weights and norms, which is cheaper than the memory. Autograd would round the same input once for each
product, multiply gradients by matrices one by one, and save a tensor for each operation of a norm and of a rotary
embedding, and for each of their gradients; most of a layer's time between products is spent on these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from palestra_cpu.cpu_kernels import CpuKernels, cpu_kernels
from palestra_cpu.torch_operators import TorchOperators, swapped

_ROUNDED = torch.bfloat16
_Backward = Callable[..., tuple[Tensor | None, ...]]


class _Context(FunctionCtx):
    """Values that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    heads: tuple[int, int]
    eps: float


def between_products() -> CpuKernels | TorchOperators:
    """Return what computes norms, rotation and gates on this machine."""
    return cpu_kernels() or TorchOperators()


def _in_own_precision(backward: _Backward) -> _Backward:
    """Compute a backward pass without autocast, so that a caller's autocast does not change how it rounds."""

    @functools.wraps(backward)
    def compute(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False):
            return backward(ctx, *gradients)

    return compute


class AttentionInput(Function):
    """Rotated queries and keys, and values: `apply(x, norm, eps, cos, sin, heads, weights, biases...)`."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        *parts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries bfloat16 [1, H, N, D], keys and values [1, K, N, D].

        Args:
            x: float32 [N, hidden], the residual stream.
            norm: float32 [hidden], weights of the norm.
            cos: float32 [N, 1, D].
            sin: float32 [N, 1, D], its first half negative.
            heads: H, of queries, and K, of keys.
            parts: float32 weights [out, hidden] of queries, keys and values, then their biases [out] or None.
        """
        weights, biases = ([part for part in found if part is not None] for found in (parts[:3], parts[3:]))
        between = between_products()
        y, factors = between.norm(x, None, norm, eps)
        whole = F.linear(y, _below(weights), torch.cat(biases).to(_ROUNDED) if biases else None)
        ctx.save_for_backward(x, norm, factors, cos, sin, *weights)
        ctx.heads, ctx.eps = heads, eps
        return between.rotate(whole, cos, sin, heads)

    @staticmethod
    @_in_own_precision
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the stream [N, hidden], the norm, the weights [n, d] and the biases."""
        x, norm, factors, cos, sin, *weights = ctx.saved_tensors
        between = between_products()
        given = torch.cat([one[0].transpose(0, 1) for one in gradients], dim=1)
        of_whole = _beside(between.rotate(given.flatten(1), cos, swapped(sin), ctx.heads))
        of_x, of_norm = between.norm_gradient(of_whole @ _below(weights), x, factors, norm, None)
        sizes = [count * cos.shape[-1] for count in (*ctx.heads, ctx.heads[1])]
        needs = ctx.needs_input_grad[6:]
        of_weights: Sequence[Tensor | None] = (None,) * 3
        of_biases: Sequence[Tensor | None] = (None,) * len(needs[3:])
        if any(needs[:3]):
            of_weights = _weight_gradients(of_whole, between.norm(x, None, norm, ctx.eps)[0], sizes)
        if any(needs[3:]):
            of_biases = torch.split(of_whole.sum(dim=0, dtype=torch.float32), sizes)
        return of_x, of_norm, None, None, None, None, *of_weights, *of_biases


class BehindAttention(Function):
    """The stream after a layer: with z = x + out(seen) and y the norm of z, z + down(silu(gate(y)) * up(y)).

    Called as `apply(x, seen, norm, eps, out, gate, up, down)`.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        seen: Tensor,
        norm: Tensor,
        eps: float,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """Return float32 [N, hidden].

        Args:
            x: float32 [N, hidden], the residual stream.
            seen: bfloat16 [N, H * D], the attention output.
            norm: float32 [hidden], weights of the norm.
            out: float32 [hidden, H * D].
            gate: float32 [inner, hidden].
            up: float32 [inner, hidden].
            down: float32 [hidden, inner].
        """
        between, stream = between_products(), x.clone()
        y, factors = between.norm(stream, F.linear(seen, out.to(_ROUNDED)), norm, eps)
        both = F.linear(y, _below([gate, up]))
        ctx.save_for_backward(stream, seen, norm, factors, both, out, gate, up, down)
        ctx.eps = eps
        return stream + F.linear(between.gate(both), down.to(_ROUNDED))

    @staticmethod
    @_in_own_precision
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the stream, the attention output, the norm and the weights [n, d]."""
        stream, seen, norm, factors, both, out, *weights, down = ctx.saved_tensors
        between, given = between_products(), gradients[0].to(_ROUNDED)
        active, of_both = between.gate_gradient(both, given @ down.to(_ROUNDED))
        of_stream, of_norm = between.norm_gradient(of_both @ _below(weights), stream, factors, norm, gradients[0])
        of_added = of_stream.to(_ROUNDED)
        of_matrices: Sequence[Tensor | None] = (None,) * 4
        if any(ctx.needs_input_grad[4:]):
            y = between.norm(stream, None, norm, ctx.eps)[0]
            of_matrices = [
                *_weight_gradients(of_added, seen, [len(out)]),
                *_weight_gradients(of_both, y, [len(weight) for weight in weights]),
                *_weight_gradients(given, active, [len(down)]),
            ]
        return of_stream, of_added @ out.to(_ROUNDED), of_norm, None, *of_matrices


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Return the results of `rotate` as the concatenated products, [N, out], without copying."""
    first = parts[0]
    return first.as_strided((first.shape[2], first.stride(2)), (first.stride(2), 1))


def _below(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices [out, in] below one another, rounded."""
    whole = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=_ROUNDED)
    for part, weight in zip(torch.split(whole, [len(w) for w in weights]), weights, strict=True):
        part.copy_(weight)
    return whole


def _weight_gradients(of_out: Tensor, given: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the gradients of matrices that read the same input, float32 [out, in] each."""
    return [part.float() for part in torch.split(of_out.t() @ given, list(sizes))]
