"""The two halves of a Llama layer as functions with gradients of their own, for bfloat16 on a CPU.

They round where transformers' modules do under autocast; only sums within a product may be in another order, because
matrices that read the same input are one product. For the backward pass they keep the streams and the products, and
round weights and make norms again, which takes less time than it takes memory to keep them. Autograd would round the
same input once for each product that reads it, multiply gradients by matrices one by one, keep a tensor for each
operation of a norm and of a rotary embedding, and make one for each of their gradients; between products, most of a
layer's time is spent on these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

_ROUNDED = torch.bfloat16


class _Context(FunctionCtx):
    """What a forward pass leaves to the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    heads: tuple[int, int]


class AttentionInput(Function):
    """Queries and keys, rotated, and values: `apply(x, norm, eps, cos, sin, heads, weights, biases...)`.

    Rotation is `y * cos + swapped(y) * sin`, where `swapped` exchanges the halves of a head, so that the first half of
    `sin` is negative.
    """

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
            ctx: of this call.
            x: float32 [N, hidden], the residual stream.
            norm: float32 [hidden], weights of the norm.
            eps: of the norm.
            cos: float32 [N, 1, D].
            sin: float32 [N, 1, D].
            heads: H, of queries, and K, of keys.
            parts: float32 weights [out, hidden] of queries, keys and values, then their biases [out] or None.
        """
        weights, biases = ([part for part in found if part is not None] for found in (parts[:3], parts[3:]))
        y, scale = normed(x, norm, eps)
        weight = _below(weights)
        whole = F.linear(y.to(_ROUNDED), weight, torch.cat(biases).to(_ROUNDED) if biases else None)
        ctx.save_for_backward(x, norm, scale, cos, sin, *weights)
        ctx.heads = heads
        queries, keys, values = split_heads(whole, cos, sin, heads)
        return queries, keys, values.clone()  # a view would keep all of `whole` until the backward pass

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the stream [N, hidden], the norm, the weights [n, d] and the biases."""
        x, norm, scale, cos, sin, *weights = ctx.saved_tensors
        weight = _below(weights)
        (of_queries, of_keys, of_values), rotated = gradients, sum(ctx.heads)
        count, width = len(x), cos.shape[-1]
        given = torch.cat((of_queries[0], of_keys[0])).transpose(0, 1).float()
        of_whole = torch.empty((count, len(weight)), dtype=_ROUNDED)
        heads = of_whole.view(count, -1, width)
        heads[:, :rotated] = (given * cos).add_(swapped(given.mul_(sin)))
        heads[:, rotated:] = of_values[0].transpose(0, 1)
        of_x, of_norm = _norm_gradient((of_whole @ weight).float(), x, norm, scale)
        sizes = [count * width for count in (*ctx.heads, ctx.heads[1])]
        needs = ctx.needs_input_grad[6:]
        of_weights: Sequence[Tensor | None] = (None,) * 3
        if any(needs[:3]):
            of_weights = _weight_gradients(of_whole, _again(x, norm, scale), sizes)
        of_biases: Sequence[Tensor | None] = (None,) * len(needs[3:])
        if any(needs[3:]):
            of_biases = torch.split(of_whole.sum(dim=0, dtype=torch.float32), sizes)
        return of_x, of_norm, None, None, None, None, *of_weights, *of_biases


class GatedProducts(Function):
    """The stream after a gated block, x + down(silu(gate(y)) * up(y)): `apply(x, norm, eps, gate, up, down)`."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return float32 [N, hidden].

        Args:
            ctx: of this call.
            x: float32 [N, hidden], the residual stream.
            norm: float32 [hidden], weights of the norm.
            eps: of the norm.
            gate: float32 [inner, hidden].
            up: float32 [inner, hidden].
            down: float32 [hidden, inner].
        """
        y, scale = normed(x, norm, eps)
        both = F.linear(y.to(_ROUNDED), _below([gate, up]))
        ctx.save_for_backward(x, norm, scale, both, gate, up, down)
        return x + F.linear(gated(both), down.to(_ROUNDED))

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the stream [N, hidden], the norm and the weights [n, d]; activations are made twice."""
        x, norm, scale, both, *weights = ctx.saved_tensors
        weight, last = _below(weights[:2]), weights[2].to(_ROUNDED)
        given = gradients[0].to(_ROUNDED)
        gate, up = both.chunk(2, dim=1)
        active = F.silu(gate)
        (of_down,) = _weight_gradients(given, active * up, [len(last)])
        of_inner, of_both = given @ last, torch.empty_like(both)
        of_gate, of_up = of_both.chunk(2, dim=1)
        torch.mul(of_inner, active, out=of_up)
        torch.ops.aten.silu_backward.grad_input(of_inner.mul_(up), gate, grad_input=of_gate)
        of_x, of_norm = _norm_gradient((of_both @ weight).float(), x, norm, scale)
        of_weights = _weight_gradients(of_both, _again(x, norm, scale), [len(weight) // 2] * 2)
        return of_x.add_(gradients[0]), of_norm, None, *of_weights, of_down


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of rows, float32 [N, hidden], as transformers rounds it, and the rows' factors [N, 1]."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * scale).mul_(weight), scale


def _again(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return what `normed` returned for rows x [N, hidden], rounded, from the factors that it found."""
    return (x * scale).mul_(weight).to(_ROUNDED)


def split_heads(whole: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, rotated, and values, bfloat16 [1, heads, N, D], of the products [N, out] of all three.

    Args:
        whole: those of queries, of keys and of values beside one another.
        cos: float32 [N, 1, D].
        sin: float32 [N, 1, D], its first half negative.
        heads: of queries, and of keys.
    """
    queries, keys = heads
    parts = whole.view(len(whole), -1, cos.shape[-1])
    given = parts[:, : queries + keys].float()
    rotated = (given * cos).add_(swapped(given).mul_(sin)).to(whole.dtype).transpose(0, 1).unsqueeze(0)
    values = parts[:, queries + keys :].transpose(0, 1).unsqueeze(0)
    return rotated[:, :queries], rotated[:, queries:], values


def swapped(given: Tensor) -> Tensor:
    """Return heads [..., D] with their halves exchanged."""
    first, second = given.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up, bfloat16 [N, inner], of gate and up beside one another, [N, 2 * inner]."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _below(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices [out, in] below one another, rounded."""
    whole = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=_ROUNDED)
    for part, weight in zip(torch.split(whole, [len(w) for w in weights]), weights, strict=True):
        part.copy_(weight)
    return whole


def _weight_gradients(of_out: Tensor, given: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the gradients of matrices that read the same input, float32 [out, in] each.

    Args:
        of_out: gradient of what they make of it, beside one another, [N, out].
        given: the input, [N, in].
        sizes: how many outputs each has.
    """
    return [part.float() for part in torch.split(of_out.t() @ given, list(sizes))]


def _norm_gradient(of_y: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input [N, hidden] and of its weights [hidden].

    Args:
        of_y: of the output, float32 [N, hidden]; it is overwritten.
        x: the input.
        weight: of the norm.
        scale: the rows' factors [N, 1].
    """
    even = x * scale
    of_weight = (of_y * even).sum(dim=0)
    of_even = of_y.mul_(weight)
    along = (of_even * even).mean(dim=-1, keepdim=True)
    return of_even.sub_(even.mul_(along)).mul_(scale), of_weight
