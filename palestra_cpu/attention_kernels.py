"""Attention of runs of tokens by compiled functions, `attention_kernels.c`: prompts of an engine, trees of a trainer.

A run is a sequence of consecutive tokens that attend to themselves and to the prefix at which the run begins. All runs
of a pass are one call per layer. Torch's attention takes a call for each, and computes its gradient in float32 or in
small products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra_cpu.kernel_arguments import beside, empty, laid, start

_HALF, _WHOLE = torch.bfloat16, torch.float32
_POINTER, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "palestra_attend_runs": [_POINTER, _COUNT] * 2
    + [_POINTER] * 3
    + [_COUNT]
    + [_POINTER] * 2
    + [_COUNT, _POINTER, _POINTER]
    + [_COUNT] * 6
    + [_NUMBER],
    "palestra_attend_runs_gradient": [_POINTER, _COUNT, _POINTER, _POINTER, _COUNT]
    + [_POINTER] * 3
    + [_COUNT, _POINTER, _COUNT]
    + [_POINTER] * 2
    + [_COUNT, _POINTER, _POINTER]
    + [_COUNT] * 6
    + [_NUMBER],
}
_BLOCK, _VECTOR = 64, 16  # as in the source: about as many queries at the same time, and numbers in a vector
_MOST_WIDTH, _MOST_PARTS = 256, 8  # of a head; of a tree whose keys many threads read
_RUN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("keys", "values", "step", "head"),
            *("length", "before", "parent", "behind", "first", "queries", "place"),
        )
    ]
)


class Runs:
    """Runs of tokens in the order of a flat batch, each beginning at a prefix of an earlier one or at no prefix.

    Attributes:
        places: total tokens, each run padded to whole vectors.
        queries: number of tokens in the batch.
        firsts: position of each run's first token, int64 [R].
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        queries: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        behind: Sequence[int] | None = None,
        trees: Sequence[int] | None = None,
    ) -> None:
        """Take R runs.

        Args:
            queries: number of last tokens of each run in the batch; None: all.
            parents: the run whose prefix each continues, -1 for none; None: none.
            behind: length of that prefix, 0 for none; None: none.
            trees: first run of each tree, whose runs attend to no other tree; None: each run is a tree.
        """
        count = len(lengths)
        given = {
            "length": lengths,
            "queries": lengths if queries is None else queries,
            "parent": [-1] * count if parents is None else parents,
            "behind": [0] * count if behind is None else behind,
        }
        self._table = table = np.zeros(count, _RUN)
        for name, column in given.items():
            if len(column) != count:
                raise ValueError(f"these are no runs: {count} of them, and {len(column)} numbers of '{name}'")
            table[name] = column
        self._trees = np.arange(count + 1) if trees is None else np.array([*trees, count], np.int64)
        self._check()
        table["first"] = np.cumsum(table["queries"]) - table["queries"]
        filled = -(-table["length"] // _VECTOR) * _VECTOR
        table["place"] = np.cumsum(filled) - filled
        self.places, self.queries = int(filled.sum()), int(table["queries"].sum())
        self.firsts: NDArray[np.int64] = table["first"].copy()
        before = table["before"]
        for number in np.flatnonzero(table["parent"] >= 0):
            before[number] = before[table["parent"][number]] + table["behind"][number]
        self._blocks: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def _check(self) -> None:
        """See the constructor."""
        table, numbers = self._table, np.arange(len(self._table))
        starts = self._trees[np.searchsorted(self._trees, numbers, side="right") - 1]
        alone, parents = table["parent"] == -1, table["parent"]
        held = np.where(alone, 0, table["length"][np.clip(parents, 0, None)]) if len(table) else parents
        right = (
            (table["queries"] >= 1)
            & (table["queries"] <= table["length"])
            & (alone | ((parents >= starts) & (parents < numbers)))
            & (table["behind"] >= np.where(alone, 0, 1))
            & (table["behind"] <= held)
        )
        ordered = self._trees[0] == 0 and (np.diff(self._trees) > 0).all()
        if not len(table) or not ordered or not right.all():
            wrong = dict(zip(_RUN.names or (), table[~right][0].tolist(), strict=True)) if not right.all() else "trees"
            raise ValueError(f"these are no runs of {len(self._trees) - 1} trees: {wrong}")

    @property
    def all_asked(self) -> bool:
        """Return whether all tokens of all runs are in the batch."""
        return bool((self._table["queries"] == self._table["length"]).all())

    def blocks(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of queries, int64 [B, 2], and the block offsets of the trees, [T + 1]. `group` is the
        number of query heads per key head.
        """
        if group not in self._blocks:
            size, table = max(1, _BLOCK // group), self._table
            starts = [np.arange(one["length"] - one["queries"], one["length"], size) for one in table]
            counts = np.array([0, *map(len, starts)])
            found = np.stack((np.repeat(np.arange(len(table)), counts[1:]), np.concatenate(starts)), axis=1)
            self._blocks[group] = found, np.cumsum(counts)[self._trees]
        return self._blocks[group]

    def lying(
        self, keys: NDArray[np.int64], values: NDArray[np.int64], step: int, heads: int | NDArray[np.int64]
    ) -> NDArray[np.void]:
        """Return the runs [R] in C's layout. `keys` and `values` are the addresses [R] of each run's first key and
        value; `step` is the stride between tokens, `heads` that between heads, for all or each.
        """
        found = self._table.copy()
        found["keys"], found["values"], found["step"], found["head"] = keys, values, step, heads
        return found


class CachedRuns(Runs):
    """Chunks of prompts after their cached tokens; their keys and values are written to the cache."""

    def __init__(self, pieces: Sequence[tuple[Tensor, int, int]]) -> None:
        """Take chunks in their order in the batch. A piece is storage [layers, 2, K, at least P, D], contiguous,
        bfloat16 on a CPU; the number of cached tokens; and the number of tokens to add.
        """
        super().__init__([old + new for _, old, new in pieces], queries=[new for _, _, new in pieces])
        shapes = {(one.shape[0], one.shape[2], one.shape[4]) for one, _, _ in pieces}
        if len(shapes) > 1:
            raise ValueError(f"pieces of one pass have one model, not these of (layers, heads, width): {shapes}")
        ((self.layers, self._heads, self._width),) = shapes
        for one, old, new in pieces:
            plain = one.is_contiguous() and one.dtype == _HALF and one.device.type == "cpu" and one.shape[1] == 2
            if not plain or old < 0 or one.shape[3] < old + new:
                raise ValueError(f"a cache {tuple(one.shape)} of {one.dtype} does not take {old} and {new} tokens")
        self._kept = [one for one, _, _ in pieces]  # for as long as their addresses
        self._starts = np.array([one.data_ptr() for one in self._kept], np.int64)
        if len(np.unique(self._starts)) < len(pieces):
            raise ValueError("two pieces of a pass don't fit one cache, which both are put into at the same time")
        self._sizes = np.array([one.shape[3] for one in self._kept], np.int64) * self._width

    def of(self, layer: int, heads: int, width: int) -> NDArray[np.void]:
        """Return the runs [R] with their addresses in a layer; see `Runs.lying`."""
        if not 0 <= layer < self.layers or (heads, width) != (self._heads, self._width):
            shape = self.layers, self._heads, self._width
            raise ValueError(f"layer {layer} with {heads} heads of {width} numbers does not fit a cache of {shape}")
        keys = self._starts + 2 * layer * heads * self._sizes * _HALF.itemsize
        return self.lying(keys, keys + heads * self._sizes * _HALF.itemsize, width, self._sizes)


class AttentionKernels:
    """The compiled functions for bfloat16 tensors on the CPU, without gradients of their own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.palestra_attend_runs_own.argtypes = [_COUNT] * 3
        library.palestra_attend_runs_own.restype = _COUNT
        self._library = library

    @staticmethod
    def takes(queries: Tensor, keys: Tensor) -> bool:
        """Return whether the functions support queries [1, H, N, D] and keys [1, K, N, D]."""
        width, group = queries.shape[3], queries.shape[1] // max(1, keys.shape[1])
        typed = queries.dtype == keys.dtype == _HALF and queries.device.type == "cpu"
        return typed and not width % 2 and 0 < width <= _MOST_WIDTH and 1 <= group <= _BLOCK

    def prompts(
        self, layer: int, new: tuple[Tensor, Tensor, Tensor], runs: CachedRuns, scale: float, window: int | None
    ) -> Tensor:
        """Write keys and values of new tokens into their caches, and return the attention output, bfloat16 [N, H, D].

        `new` are queries [1, H, N, D], keys and values [1, K, N, D], of the new tokens of all runs; `window` counts a
        token's own position, None: all before it.
        """
        heads, groups = new[0].shape[1], new[1].shape[1]
        read = _read(new, runs, window)
        table = runs.of(layer, groups, new[0].shape[3])
        return self._attended(table, runs, read, (heads, groups), scale, window, None)

    def trees(
        self, new: tuple[Tensor, Tensor, Tensor], runs: Runs, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output, bfloat16 [N, H, D], and the logsumexp of the scores, float32 [H, N]. `new` are
        queries [1, H, N, D], keys and values [1, K, N, D]; `window` counts a token's own position, None: all before it.
        """
        heads, groups, count = new[0].shape[1], new[1].shape[1], new[0].shape[2]
        read = _read(new, runs, window)
        sums = empty(_WHOLE, heads, count)
        return self._attended(self._placed(runs, *read), runs, read, (heads, groups), scale, window, sums), sums

    def trees_gradient(
        self,
        of_out: Tensor,
        new: tuple[Tensor, Tensor, Tensor],
        made: tuple[Tensor, Tensor],
        runs: Runs,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, bfloat16 [1, H, N, D], keys and values [1, K, N, D]; other arguments as in
        `trees`. `of_out` is the gradient of the result of `trees`, [N, H, D].
        """
        (_, heads, count, width), groups = new[0].shape, new[1].shape[1]
        parts, stride = _read(new, runs, window)
        table = self._placed(runs, parts, stride)
        given = [laid(one, _HALF, count, heads, width) for one in (of_out, made[0])]
        sums = laid(made[1], _WHOLE, heads, count)
        blocks, trees = runs.blocks(heads // groups)
        # Keys that few trees have are read by all threads, each of which adds up what its queries bring.
        most = min(_MOST_PARTS, int(np.diff(trees).max()))
        shares = max(1, min(most, -(-2 * torch.get_num_threads() // (groups * (len(trees) - 1)))))
        size = groups * runs.places * (-(-width // _VECTOR) * _VECTOR)
        added, room = empty(_WHOLE, 2, shares, size).zero_(), empty(_HALF, 3, size)
        found, own = empty(_HALF, count, heads + 2 * groups, width), self._own(heads // groups, width, True)
        threads = len(own)
        self._library.palestra_attend_runs_gradient(
            *(table.ctypes.data, len(table), blocks.ctypes.data, trees.ctypes.data, len(trees) - 1),
            *map(start, (*given, parts[0])),
            *(stride, start(sums), count, start(found), start(added), shares, start(room)),
            *(start(own), threads, runs.places, groups, heads // groups, width, window or 0, scale),
        )
        whole = found.transpose(0, 1).unsqueeze(0)
        return whole[:, :heads], whole[:, heads : heads + groups], whole[:, heads + groups :]

    def _own(self, group: int, width: int, gradient: bool) -> Tensor:
        """Return memory that each thread has for itself, float32 [threads, size]."""
        size = self._library.palestra_attend_runs_own(group, width, int(gradient))
        return empty(_WHOLE, torch.get_num_threads(), size)

    @staticmethod
    def _placed(runs: Runs, parts: Sequence[Tensor], stride: int) -> NDArray[np.void]:
        """Return runs with the addresses of their keys and values [1, K, N, D] in the batch; see `Runs.lying`."""
        if not runs.all_asked:
            raise ValueError("runs without a cache have all their tokens in the batch")
        keys, values = (runs.firsts * (stride * _HALF.itemsize) + one.data_ptr() for one in parts[1:])
        return runs.lying(keys, values, stride, parts[1].shape[3])

    def _attended(
        self,
        table: NDArray[np.void],
        runs: Runs,
        read: tuple[Sequence[Tensor], int],
        heads: tuple[int, int],
        scale: float,
        window: int | None,
        sums: Tensor | None,
    ) -> Tensor:
        """Return the attention output, bfloat16 [N, H, D]."""
        (parts, stride), (queries, groups) = read, heads
        count, width = parts[0].shape[2:]
        blocks, _ = runs.blocks(queries // groups)
        out = empty(_HALF, count, queries, width)
        room = empty(_HALF, 2, groups, runs.places, -(-width // _VECTOR) * _VECTOR)
        own = self._own(queries // groups, width, False)
        threads = len(own)
        new = parts if sums is None else (parts[0], None, None)
        self._library.palestra_attend_runs(
            *(table.ctypes.data, len(table), blocks.ctypes.data, len(blocks)),
            *map(start, new),
            *(stride, start(out), start(sums), count, start(room)),
            *(start(own), threads, runs.places, groups, queries // groups, width, window or 0, scale),
        )
        return out


def _read(new: tuple[Tensor, Tensor, Tensor], runs: Runs, window: int | None) -> tuple[Sequence[Tensor], int]:
    """Return queries [1, H, N, D], keys and values [1, K, N, D] in C's layout; see `beside`."""
    if window is not None and not 1 <= window < 2**62:
        raise ValueError(f"a window of at least 1 token is needed, not of {window}")
    queries, groups, shape = new[0].shape[1], new[1].shape[1], tuple(new[0].shape)
    if not AttentionKernels.takes(*new[:2]) or queries % groups or shape[2] != runs.queries:
        raise ValueError(f"queries {shape} don't fit {groups} heads of keys and runs of {runs.queries} tokens")
    return beside(new, (queries, groups))
