"""Attention within trees in bfloat16 on a CPU, by compiled functions: each run of a tree once, in one call a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palestra.models.attention_kernels import AttentionKernels, Runs
from palestra.trainer.packing import Tree


def runs_of(trees: Sequence[Tree]) -> Runs:
    """Return the runs of trees whose nodes lie one after another, [N] in all, in a flat batch."""
    lengths, parents, behind, starts = list[int](), list[int](), list[int](), list[int]()
    for tree in trees:
        starts.append(len(lengths))
        firsts = [first for first, _, _ in tree.runs]
        for first, last, parent in tree.runs:
            number = int(np.searchsorted(firsts, parent, side="right")) - 1  # -1: it begins behind no node
            lengths.append(last - first)
            parents.append(number + starts[-1] if parent >= 0 else -1)
            behind.append(parent + 1 - firsts[number] if parent >= 0 else 0)
    return Runs(lengths, parents=parents, behind=behind, trees=starts)


class RunAttention(torch.autograd.Function):
    """What the tokens of runs see: `apply(query, key, value, runs, kernels, scale, window)`."""

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
