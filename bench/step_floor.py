"""The least arithmetic that a step takes: its multiplications by the weights, at this machine's rate of products.

A multiply-add is two operations. A token forward costs two a weight, forward and backward six. Weights are those of
the matrices that tokens go through; the output head only counts where a token is predicted. Left out: attention
between positions (under 2 % at 52 tokens), norms, the softmax over the vocabulary, and the optimizer, which waits for
memory and not for arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = {"1088 x 576 x 1536": (1088, 576, 1536), "2048 x 2048 x 2048": (2048, 2048, 2048)}
REPEATS, SECONDS = 7, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """How many numbers a model multiplies by."""

    body: int  # for each token that is computed
    head: int  # for each token that is predicted


def count_weights(parameters: Sequence[tuple[str, Tensor]], vocabulary: int) -> Weights:
    """From a model's parameters. The embedding is looked up, not multiplied by; where it is tied, it is the head."""
    matrices = [p for _, p in parameters if p.ndim == 2]
    tables = [p.numel() for p in matrices if vocabulary in p.shape]
    return Weights(body=sum(p.numel() for p in matrices) - sum(tables), head=tables[0])


def train_flop(weights: Weights, computed: int, predicted: int) -> float:
    """Forward and backward of `computed` tokens, of which `predicted` positions go through the head."""
    return 6.0 * (weights.body * computed + weights.head * predicted)


def generate_flop(weights: Weights, computed: int, predicted: int) -> float:
    """Forward only."""
    return 2.0 * (weights.body * computed + weights.head * predicted)


def product_rates(threads: int) -> dict[str, float]:
    """bfloat16 matrix products in floating-point operations a second, by shape: the median of a few tries."""
    torch.set_num_threads(threads)
    rates = {}
    for name, (rows, inner, columns) in SHAPES.items():
        left = torch.randn(rows, inner, dtype=torch.bfloat16)
        right = torch.randn(columns, inner, dtype=torch.bfloat16)
        seconds = _product_seconds(left, right)
        rates[name] = 2.0 * rows * inner * columns / seconds
    return rates


def best_rate(rates: Mapping[str, float]) -> float:
    """The larger one."""
    return max(rates.values())


def _product_seconds(left: Tensor, right: Tensor) -> float:
    """Seconds of one product: [M, K] by the transpose of [N, K]."""
    torch.nn.functional.linear(left, right)
    tries = []
    for _ in range(REPEATS):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            torch.nn.functional.linear(left, right)
            count += 1
        tries.append((time.perf_counter() - start) / count)
    return statistics.median(tries)
