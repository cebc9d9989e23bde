"""The operations between a Llama layer's matrix products by torch's operators, for machines without a compiler.

The results are the bits of transformers' modules under autocast to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from palestra_cpu.attention_kernels import AttentionKernels, Runs


def runs_of_trees(trees: Sequence[Sequence[tuple[int, int, int]]]) -> Runs:
    """Return the runs of concatenated trees, [N] nodes in all, in a flat batch; see `Kernels.trees`."""
    lengths, parents, behind, starts = list[int](), list[int](), list[int](), list[int]()
    for tree in trees:
        starts.append(len(lengths))
        firsts, lasts, nodes = np.array(tree, np.int64).reshape(-1, 3).T
        numbers = np.searchsorted(firsts, nodes, side="right") - 1  # -1: a run begins behind no node
        lengths += (lasts - firsts).tolist()
        parents += np.where(nodes < 0, -1, numbers + starts[-1]).tolist()
        behind += np.where(nodes < 0, 0, nodes + 1 - firsts[numbers]).tolist()
    return Runs(lengths, parents=parents, behind=behind, trees=starts)


class RunAttention(torch.autograd.Function):
    """What the tokens of runs see: `apply(query, key, value, runs, kernels, (scale, window))`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: Runs,
        kernels: AttentionKernels,
        how: tuple[float, int | None],
    ) -> Tensor:
        """Return [N, H, D] for queries [1, H, N, D] and keys and values [1, K, N, D]."""
        out, sums = kernels.trees((query, key, value), runs, *how)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.given = runs, *how
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries [1, H, N, D], keys and values [1, K, N, D]."""
        query, key, value, out, sums = ctx.saved_tensors
        found = ctx.kernels.trees_gradient(of_out, (query, key, value), (out, sums), *ctx.given)
        return *found, None, None, None


class TorchOperators:
    """The functions of `CpuKernels` for tensors on any device, without gradients of their own."""

    @staticmethod
    def norm(stream: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add to a residual stream, in place; return its RMS norm, bfloat16 [N, width], and the rows' factors. `stream`
        is float32 [N, width], `added` bfloat16 [N, width], `weight` float32 [width].
        """
        x = stream if added is None else stream.add_(added)
        factors = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (x * factors).mul_(weight).to(torch.bfloat16), factors

    @staticmethod
    def norm_gradient(
        of_out: Tensor, stream: Tensor, factors: Tensor, weight: Tensor, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a norm's input, float32 [N, width], and of its weights [width].

        `of_out` is the gradient of the norm, bfloat16 [N, width]; `stream`, its input, and `more`, added to the
        gradient of the input, are float32 [N, width]; `factors` [N, 1] are those that `norm` returned; `weight` is
        float32 [width].
        """
        given, even = of_out.float(), stream * factors
        of_weight = (given * even).sum(dim=0)
        of_even = given.mul_(weight)
        along = (of_even * even).mean(dim=-1, keepdim=True)
        of_stream = of_even.sub_(even.mul_(along)).mul_(factors)
        return of_stream if more is None else of_stream.add_(more), of_weight

    @staticmethod
    def rotate(whole: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, bfloat16 [1, heads, N, D], from their concatenated products [N,
        out].

        Rotation is `y * cos + swapped(y) * sin`. Its gradient is the same function of the gradient, with
        `swapped(sin)`. `cos` and `sin`, whose first half is negative, are float32 [N, 1, D].
        """
        queries, keys = heads
        parts = whole.view(len(whole), -1, cos.shape[-1])
        given = parts[:, : queries + keys].float()
        rotated = (given * cos).add_(swapped(given).mul_(sin)).to(whole.dtype)
        found = torch.cat((rotated, parts[:, queries + keys :]), dim=1).transpose(0, 1).unsqueeze(0)
        return found[:, :queries], found[:, queries : queries + keys], found[:, queries + keys :]

    @staticmethod
    def gate(both: Tensor) -> Tensor:
        """Return silu(gate) * up, bfloat16 [N, inner], for concatenated gate and up, [N, 2 * inner]."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def gate_gradient(both: Tensor, of_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `gate`, and the gradient of `both`, bfloat16 [N, 2 * inner]. `both` is gate and up,
        concatenated; `of_out` is bfloat16 [N, inner].
        """
        gate, up = both.chunk(2, dim=1)
        active, of_both = F.silu(gate), torch.empty_like(both)
        of_gate, of_up = of_both.chunk(2, dim=1)
        torch.mul(of_out, active, out=of_up)
        torch.ops.aten.silu_backward.grad_input(of_out * up, gate, grad_input=of_gate)
        return active.mul_(up), of_both


def swapped(given: Tensor) -> Tensor:
    """Return heads [..., D] with their halves exchanged."""
    first, second = given.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
