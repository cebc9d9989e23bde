"""Attention within the trees of a micro-batch on a CUDA device, by FlexAttention, without an [N, N] mask.

A node attends to itself and its ancestors. In a depth-first walk, node `j` is an ancestor of `i` if `i` is entered
after `j` and before the walk leaves the subtree of `j`. So the mask is two numbers per node, and memory grows linearly.
Pairs of blocks without attention are skipped; pairs with full attention need no comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from palestra.trainer.packing import Tree

BLOCK = 128  # nodes: the kernel's default
_MOST_VARIANTS = 256  # of a compiled kernel; models of one kind need four


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return FlexAttention compiled for a device; on a CPU as it is, slowly and with all scores: for tests."""
    if device == "cpu":
        return flex_attention
    # Dynamo counts what it has compiled for all models of a process together: gradients or none, one block or more,
    # windows, shapes of heads. Behind its limit the mask and all scores would be made, as on a CPU.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


class BlockAttention:
    """Attention within each tree of a micro-batch; nodes of different trees never attend to each other."""

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        self._trees, self._device = trees, device
        self._count = sum(map(len, trees))
        self._blocks = -(-self._count // BLOCK)
        self._masks: dict[int | None, BlockMask] = {}
        places = [np.asarray(tree.positions) for tree in trees]
        self._positions = self._padded(np.concatenate(places) if places else np.empty(0, np.int64))
        ends = [walk(tree) for tree in trees]
        starts = np.cumsum([0, *map(len, trees)])[:-1]
        entries = [entry + start for (entry, _), start in zip(ends, starts, strict=True)]
        leaves = [leave + start for (_, leave), start in zip(ends, starts, strict=True)]
        self._entry, self._leave = self._padded(np.concatenate(entries)), self._padded(np.concatenate(leaves))
        alone = np.arange(self._count, self._blocks * BLOCK)  # padding of the last block, which sees only itself
        self._entry[self._count :], self._leave[self._count :] = alone, alone + 1

    def _padded(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return numbers of the nodes, [N], with zeros up to whole blocks."""
        return np.pad(numbers, (0, self._blocks * BLOCK - len(numbers)))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of each node to itself and its ancestors, [N, H, D]. Queries are [1, H, N, D], keys and
        values [1, K, N, D]; `window` counts the token itself, None: all ancestors.
        """
        if window not in self._masks:
            self._masks[window] = self.mask(window)
        more = self._blocks * BLOCK - self._count
        padded = (F.pad(each, (0, 0, 0, more)) for each in (query, key, value))
        out: Tensor = _kernel(self._device.type)(*padded, block_mask=self._masks[window], scale=scale, enable_gqa=True)
        return out[0, :, : self._count].transpose(0, 1)

    def mask(self, window: int | None) -> BlockMask:
        """Return the block mask. A token attends to `window` tokens, itself included; None: to all ancestors."""
        entry, leave, place = (
            torch.from_numpy(numbers).to(self._device) for numbers in (self._entry, self._leave, self._positions)
        )

        def sees(_batch: Tensor, _head: Tensor, node: Tensor, other: Tensor) -> Tensor:  # of indices, [] each
            found = (entry[other] <= entry[node]) & (entry[node] < leave[other])
            return found if window is None else found & (place[node] - place[other] < window)

        seen = self._seen_pairs()
        some, full = seen > 0, seen == BLOCK * BLOCK
        if window is not None:
            places = self._positions.reshape(self._blocks, BLOCK)
            some &= places.min(axis=1)[:, None] - places.max(axis=1) < window
            full &= places.max(axis=1)[:, None] - places.min(axis=1) < window
        last = self._blocks - 1
        some[last, last] = True  # also for a block of nothing but padding
        return BlockMask.from_kv_blocks(
            *_indices(some & ~full, self._device),
            *_indices(full & some, self._device),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(self._blocks * BLOCK, self._blocks * BLOCK),
        )

    def _seen_pairs(self) -> NDArray[np.int64]:
        """Return how many pairs of nodes of two blocks see each other, [blocks, blocks]."""
        found, start = np.zeros((self._blocks, self._blocks), np.int64), 0
        for tree in self._trees:
            for first, last, above in _chains(tree):
                first, last = first + start, last + start
                rows, at = _spread(first, last)
                for begin, end in above:
                    columns, to = _spread(begin + start, end + start)
                    found[at, to] += rows[:, None] * columns
                found[at, at] += np.tril(rows[:, None] * rows, -1) + np.diag(rows * (rows + 1) // 2)
            start += len(tree)
        return found


def walk(tree: Tree) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when a depth-first walk enters each node and when it leaves the node's subtree, [n] each."""
    behind = np.zeros(len(tree), np.int64)  # nodes that are behind a node in chains which begin there
    for first, last, parent in reversed(tree.runs):
        if parent >= 0:
            behind[parent] += last - first + behind[first:last].sum()
    entry, leave = np.zeros(len(tree), np.int64), np.zeros(len(tree), np.int64)
    next_entry, roots = np.zeros(len(tree), np.int64), 0
    for first, last, parent in tree.runs:
        sizes = 1 + behind[first:last]
        start = roots if parent < 0 else next_entry[parent]
        entry[first:last] = start + np.cumsum(sizes) - sizes
        leave[first:last] = start + sizes.sum()
        next_entry[first:last] = entry[first:last] + 1  # chains that begin behind a node come before its next one
        if parent < 0:
            roots = start + sizes.sum()
        else:
            next_entry[parent] = start + sizes.sum()
    return entry, leave


def _chains(tree: Tree) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield the chains of a tree: first node, one past the last, and the ranges of nodes above it."""
    above: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # by the first node: one past the last, and what is above
    firsts = [first for first, _, _ in tree.runs]
    for first, last, parent in tree.runs:
        ranges = list[tuple[int, int]]()
        if parent >= 0:
            chain = firsts[int(np.searchsorted(firsts, parent, side="right")) - 1]
            ranges = [*above[chain][1], (chain, parent + 1)]
        above[first] = (last, ranges)
        yield first, last, ranges


def _spread(first: int, last: int) -> tuple[NDArray[np.int64], slice]:
    """Return how many nodes of a range are in each of its blocks, [blocks], and which blocks these are."""
    blocks = np.arange(first // BLOCK, (last - 1) // BLOCK + 1)
    inside = np.minimum(last, (blocks + 1) * BLOCK) - np.maximum(first, blocks * BLOCK)
    return inside, slice(int(blocks[0]), int(blocks[-1]) + 1)


def _indices(pairs: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each block sees, int32 [1, 1, n], and their numbers first in each row, [1, 1, n, n]."""
    order = np.argsort(~pairs, axis=1, kind="stable")
    count, numbers = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (pairs.sum(axis=1), order))
    return count[None, None], numbers[None, None]
