"""Attention within trees in bfloat16 on a CPU, by compiled functions: each run of a tree once, in one call a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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
    """Attention of the tokens of runs: `apply(query, key, value, runs, kernels, scale, window)`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: Runs,
        kernels: AttentionKernels,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Return [N, H, D] for queries [1, H, N, D] and keys and values [1, K, N, D]."""
        out, sums = kernels.trees((query, key, value), runs, scale, window)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.given = runs, scale, window
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries [1, H, N, D], keys and values [1, K, N, D]."""
        query, key, value, out, sums = ctx.saved_tensors
        found = ctx.kernels.trees_gradient(of_out, (query, key, value), (out, sums), *ctx.given)
        return *found, None, None, None, None
