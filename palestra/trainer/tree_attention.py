"""Attention within the trees of a micro-batch, without an [N, N] mask.

A node attends to itself and its ancestors. In bfloat16 on a CPU, one kernel call may compute all runs of the trees; see
`Kernels.trees`. Otherwise the chains of a tree are computed branch by branch: chains that begin at the same node have
the same ancestors, and are one call. Scores of siblings and cousins, which a mask would discard, are not computed.
Memory grows linearly: keys are gathered for one branch at a time, and again in the backward pass. For a GPU see
`BlockAttention`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.models.kernels import kernels
from palestra.trainer.block_attention import BlockAttention
from palestra.trainer.packing import Tree

_CALL = 4096  # scores that take about as long as what a call takes besides: fewer are not worth a call of their own
_BLOCK = 512  # most nodes of a chain in one call: the later ones are masked for the earlier ones
# With fewer rows torch's backward kernel works in small pieces, and is up to four times slower than plain products
# (docs/benchmarks.md), which compute also what a causal call leaves out; they are made for so many scores of a head at
# most, because these exist in memory.
_KERNEL_ROWS, _CAUSAL_ROWS, _PRODUCT_SCORES = 768, 192, 2**21


@dataclass(frozen=True, slots=True)
class Branch:
    """Nodes whose attention is computed in one call.

    Attributes:
        nodes: int64 [M].
        before: int64 [P], their common ancestors.
        own: bool [M, M], attention among the nodes; None: causal, because they are one chain.
    """

    nodes: NDArray[np.int64]
    before: NDArray[np.int64]
    own: Tensor | None

    def seen(self, positions: NDArray[np.int64], window: int | None) -> Tensor | None:
        """Return which of `before` and `nodes` each node attends to, bool [M, P + M]; None: causal without ancestors.
        `window` counts the token itself; None: all ancestors.
        """
        count = len(self.nodes)
        if window is not None and int(positions[self.nodes].max()) < window:
            window = None
        if self.own is None and not len(self.before) and window is None:
            return None
        own = torch.ones((count, count), dtype=torch.bool).tril() if self.own is None else self.own
        seen = torch.cat((torch.ones((count, len(self.before)), dtype=torch.bool), own), dim=1)
        if window is not None:
            places = torch.from_numpy(positions[np.concatenate((self.before, self.nodes))])
            seen &= places[len(self.before) :].unsqueeze(1) - places < window
        return seen


def branches(tree: Tree) -> list[Branch]:
    """Divide the nodes of a tree into branches, with few wasted scores and few calls."""
    if len(tree) ** 2 <= _CALL or len(tree.runs) == 1:
        return [Branch(np.arange(len(tree)), np.empty(0, np.int64), tree.mask())]
    behind: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, last, parent in tree.runs:
        behind[parent].append((first, last))
    found = []
    for parent, chains in behind.items():
        before = _ancestors(tree, parent)
        for family in _families(chains):
            if len(family) > 1:
                nodes = np.concatenate([np.arange(*chain) for chain in family])
                lengths = [last - first for first, last in family]
                own = torch.block_diag(*(torch.ones((n, n)).tril() for n in lengths)).bool()  # type: ignore[no-untyped-call]
                found.append(Branch(nodes, before, own))
            else:
                found += _blocks(*family[0], before)
    return found


def _families(chains: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield groups of chains behind one node; two chains share a call if that wastes few scores."""
    family: list[tuple[int, int]] = []
    count = 0
    for first, last in chains:
        if family and 2 * count * (last - first) > _CALL:
            yield family
            family, count = [], 0
        family.append((first, last))
        count += last - first
    yield family


def _blocks(first: int, last: int, before: NDArray[np.int64]) -> Iterator[Branch]:
    """Yield the branches of a chain behind the nodes `before` [P]: all of it without any, otherwise pieces."""
    size = _BLOCK if len(before) else last - first
    for start in range(first, last, size):
        above = np.concatenate((before, np.arange(first, start)))
        yield Branch(np.arange(start, min(start + size, last)), above, None)


def _ancestors(tree: Tree, node: int) -> NDArray[np.int64]:
    """Return a node and its ancestors, the root first, [P]; empty for -1."""
    firsts = np.array([first for first, _, _ in tree.runs])
    parts = []
    while node >= 0:
        first, _, parent = tree.runs[int(np.searchsorted(firsts, node, side="right")) - 1]
        parts.append(np.arange(first, node + 1))
        node = parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)


class TreeAttention:
    """Attention within each tree of a micro-batch, an `AttentionBackend`.

    Tokens of different trees do not see each other.
    """

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        self._trees, self._compiled = trees, kernels().trees([tree.runs for tree in trees])
        self._calls: dict[int | None, list[_Call]] = {}
        self._blocks = None if device.type == "cpu" else BlockAttention(trees, device)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Return the attention of each node to itself and its ancestors, [N, H, D]; see `AttentionBackend`. Queries are
        [1, H, N, D], keys and values [1, K, N, D].
        """
        if self._blocks is not None:
            return self._blocks(query, key, value, scale, window)
        if (seen := self._compiled(layer, query, key, value, scale, window)) is not None:
            return seen
        if window not in self._calls:
            self._calls[window] = list(self._calls_of(window))
        out: Tensor = _BranchAttention.apply(query, key, value, self._calls[window], scale)  # type: ignore[no-untyped-call]
        return out

    def _calls_of(self, window: int | None) -> Iterator[_Call]:
        """Yield the calls of all trees, with indices into the flat batch."""
        start = 0
        for tree in self._trees:
            positions = np.asarray(tree.positions)
            for branch in branches(tree):
                nodes, keys = branch.nodes + start, np.concatenate((branch.before, branch.nodes)) + start
                yield _Call(_place(nodes), _place(keys), branch.seen(positions, window))
            start += len(tree)


@dataclass(frozen=True, slots=True)
class _Call:
    """A branch by indices into the flat batch: nodes [M], keys [S], and bool [M, S] attention or None."""

    nodes: Tensor | slice
    keys: Tensor | slice
    seen: Tensor | None

    def gathered(self, key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the call, [1, K, S, D] each; for a causal call of each query head."""
        pair = _picked(key, 2, self.keys), _picked(value, 2, self.keys)
        if self.seen is not None:
            return pair
        first, second = (part.repeat_interleave(heads // key.shape[1], dim=1) for part in pair)
        return first, second

    def added(self, dtype: torch.dtype, repeats: int) -> Tensor | None:
        """Return the mask added to the scores of queries [repeats * M], all nodes once for each head; None: causal."""
        if self.seen is None:
            return None
        return torch.zeros(self.seen.shape, dtype=dtype).masked_fill_(~self.seen, -torch.inf).repeat(repeats, 1)

    def rows(self, given: Tensor, heads: int) -> Tensor:
        """Return the rows [N, H, D] of the call's nodes as queries: of `heads` heads, each with those of its group."""
        picked = _picked(given, 0, self.nodes).transpose(0, 1)
        return picked.reshape(1, heads, -1, given.shape[-1]) if self.seen is not None else picked.unsqueeze(0)


def _place(numbers: NDArray[np.int64]) -> Tensor | slice:
    """Return ascending indices [M]; consecutive ones as a slice, which copies nothing."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else torch.from_numpy(numbers)


def _picked(given: Tensor, dim: int, place: Tensor | slice) -> Tensor:
    """Return the part of a tensor at the indices or slice of one dimension."""
    if isinstance(place, slice):
        return given.narrow(dim, place.start, place.stop - place.start)
    return given.index_select(dim, place)


class _BranchAttention(torch.autograd.Function):
    """The calls of all branches by torch's CPU kernels; query heads that read the same keys are queries of one head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[_Call], scale: float) -> Tensor:
        """Return [N, H, D] for queries [1, H, N, D] and keys and values [1, K, N, D]."""
        flat = query[0].transpose(0, 1)
        (count, heads, width), groups = flat.shape, key.shape[1]
        out = torch.empty_like(flat, memory_format=torch.contiguous_format)
        sums = query.new_empty((heads, count), dtype=_exact(query))
        for call in calls:
            keys, values = call.gathered(key, value, heads)
            added = call.added(query.dtype, heads // groups)
            made, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                call.rows(flat, groups), keys, values, is_causal=added is None, attn_mask=added, scale=scale
            )
            out[call.nodes] = made.reshape(heads, -1, width).transpose(0, 1)
            sums[:, call.nodes] = total.reshape(heads, -1)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries [1, H, N, D], keys and values [1, K, N, D], which are summed in float32."""
        query, key, value, out, sums = ctx.saved_tensors
        flat = query[0].transpose(0, 1)
        (_, heads, width), groups = flat.shape, key.shape[1]
        of_queries = torch.empty_like(flat, memory_format=torch.contiguous_format)
        of_keys, of_values = (torch.zeros(key.shape[1:], dtype=_exact(key)) for _ in range(2))
        for call in ctx.calls:
            keys, values = call.gathered(key, value, heads)
            rows = call.rows(flat, groups)
            total = sums[:, call.nodes].reshape(rows.shape[:3])
            given = (call.rows(grad, groups), rows, keys, values, call.rows(out, groups), total)
            few = (
                rows.shape[2] < (_CAUSAL_ROWS if call.seen is None else _KERNEL_ROWS)
                and rows.shape[2] * keys.shape[2] <= _PRODUCT_SCORES
            )
            if few:
                made = _gradients(given, call.added(_exact(rows), heads // groups), ctx.scale)
            else:
                added = call.added(query.dtype, heads // groups)
                made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *given, 0.0, added is None, attn_mask=added, scale=ctx.scale
                )
            of_queries[call.nodes] = made[0].reshape(heads, -1, width).transpose(0, 1).to(query.dtype)
            for whole, part in zip((of_keys, of_values), made[1:], strict=True):
                heads_of_group = part[0].to(whole.dtype).view(groups, -1, *part.shape[2:])
                if isinstance(call.keys, slice):
                    whole[:, call.keys] += heads_of_group.sum(dim=1)
                else:
                    whole.index_add_(1, call.keys, heads_of_group.sum(dim=1))
        of_inputs = of_queries.transpose(0, 1), of_keys.to(key.dtype), of_values.to(value.dtype)
        return *(gradient.unsqueeze(0) for gradient in of_inputs), None, None


def _gradients(given: Sequence[Tensor], added: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one call's queries, keys and values by plain products, in at least float32. `given` are
    the gradient of the output, queries, keys, values, output, and the logarithms of the scores' sums.
    """
    *tensors, sums = given
    g, q, k, v, o = (tensor[0].to(sums.dtype) for tensor in tensors)
    if added is None:
        added = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=q.dtype).triu_(diagonal=1)
    weights = torch.baddbmm(added, q, k.transpose(1, 2), alpha=scale).sub_(sums[0].unsqueeze(-1)).exp_()
    of_values = torch.bmm(weights.transpose(1, 2), g)
    of_scores = torch.bmm(g, v.transpose(1, 2)).sub_((g * o).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
    found = torch.bmm(of_scores, k), torch.bmm(of_scores.transpose(1, 2), q), of_values
    first, second, third = (gradient.unsqueeze(0) for gradient in found)
    return first, second, third


def _exact(given: Tensor) -> torch.dtype:
    """Return the precision of sums of numbers of any shape: at least float32."""
    return torch.promote_types(given.dtype, torch.float32)
