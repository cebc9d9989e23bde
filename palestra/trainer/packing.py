"""Merges rows into trees, so that tokens shared by several rows are computed once.

The episodes of a group share their prompt, so most of a flat batch is repetition. Rows with a common prefix become a
tree in which each token attends only to its ancestors. The gradient of a shared token is the sum of the gradients of
its copies. Placeholders of different images are different tokens, although their ids are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.tokens import TokenRun
from palestra.types.calls import Floats
from palestra.types.records import TrainSample

_NONE = np.empty(0, np.int64)  # no nodes


class Tree:
    """Rows merged on their common prefixes. Nodes are tokens, in the order in which they were added.

    Attributes:
        ids: token id of each node.
        positions: position of each node in its row, from 0.
        runs: chains of nodes: (first node, one past the last, parent node or -1).
        paths: for each row its nodes, int64 [N].
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.runs: list[tuple[int, int, int]] = []
        self.paths: list[NDArray[np.int64]] = []
        # The runs that begin behind a node, -1 being the root: with each run its first node. No two begin alike.
        self._runs_behind: defaultdict[int, list[tuple[TokenRun, int]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.ids)

    def shared(self, row: TokenRun) -> NDArray[np.int64]:
        """Return the nodes of the longest prefix that the row shares with the tree.

        The number of rows does not matter: at each node at most one run continues as the row does.
        """
        parts, parent, start = [_NONE], -1, 0
        while start < len(row):
            rest = row[start:]
            found = ((known.common(rest), first) for known, first in self._runs_behind.get(parent, ()))
            common, first = next((pair for pair in found if pair[0]), (0, 0))
            if not common:
                break
            parts.append(np.arange(first, first + common))
            parent, start = first + common - 1, start + common
        return np.concatenate(parts)

    def add(self, row: TokenRun, shared: NDArray[np.int64]) -> None:
        """Add a row of N tokens; only tokens that no earlier row has become nodes. Pass `shared` as the method of that
        name returned it.
        """
        common = len(shared)
        first, last = len(self.ids), len(self.ids) + len(row) - common
        if last > first:
            parent = int(shared[-1]) if common else -1
            self.runs.append((first, last, parent))
            self._runs_behind[parent].append((row[common:], first))
            self.ids.extend(row.ids[common:].tolist())
            self.positions.extend(range(common, len(row)))
        self.paths.append(np.concatenate((shared, np.arange(first, last))))

    def mask(self) -> Tensor | None:
        """Return which nodes each node attends to, bool [n, n]; None: the tree is a single chain."""
        if len(self.runs) == 1:
            return None
        seen = torch.zeros((len(self), len(self)), dtype=torch.bool)
        for first, last, parent in self.runs:
            if parent >= 0:
                seen[first:last, :first] = seen[parent, :first]
            seen[first:last, first:last] = torch.ones((last - first, last - first), dtype=torch.bool).tril()
        return seen


@dataclass(slots=True)
class MicroBatch:
    """Trees that the model computes together, and their rows.

    Attributes:
        samples: each row with the offset of its tree in the flat batch and its path [N] in the tree.
    """

    trees: list[Tree] = field(default_factory=list)
    samples: list[tuple[TrainSample, int, NDArray[np.int64]]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return how many tokens the model computes."""
        return sum(map(len, self.trees))

    def targets(self) -> dict[str, Tensor]:
        """Return columns [T] of the trained tokens of all rows, in order of the rows.

        `source` is the node that predicts the token, `node` the token's own node and `target` its id; `version` is [T,
        2]. The other columns have the names of `LossInputs` and `TrainSample`.
        """
        columns: defaultdict[str, list[NDArray[np.generic]]] = defaultdict(list)
        for sample, offset, path in self.samples:
            trained = np.flatnonzero(sample.loss_mask)
            columns["source"].append(path[trained - 1] + offset)
            columns["node"].append(path[trained] + offset)
            targets = sample.ids if sample.targets is None else sample.targets
            columns["target"].append(targets[trained].astype(np.int64))
            columns["sampling_logprobs"].append(sample.logprobs[trained])
            columns["version"].append(sample.versions[trained])
            columns["advantages"].append(sample.advantages[trained])
            columns["loss_weights"].append(sample.loss_weights[trained])
            columns["temperature"].append(sample.temperatures[trained])
            for name in ("old_logprobs", "reference_logprobs", "values", "returns"):
                column: Floats | None = getattr(sample, name)
                if column is not None:  # either all rows of a batch have them, or none has
                    columns[name].append(column[trained])
        return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}


class Pass(NamedTuple):
    """One micro-batch, and what is computed with it.

    Attributes:
        adds: whether it adds to a gradient that others may compute in a pass with theirs.
    """

    micro: MicroBatch
    work: Callable[[MicroBatch], object]
    adds: bool = True


def pack(samples: Sequence[TrainSample], max_tokens: int) -> list[MicroBatch]:
    """Pack rows, in order, into micro-batches of at most `max_tokens` computed tokens.

    A micro-batch is larger if one row is, or if a row shares half of its tokens with earlier rows: then it may have up
    to twice the row's length, so that a long prompt is not computed for each answer. Equal rows in equal order give the
    same arithmetic.
    """
    batches: list[MicroBatch] = []
    tree: Tree | None = None
    for sample in samples:
        if sample.loss_mask[0]:
            raise ValueError(f"the first token of a row of episode {sample.episode_id} can't be a sampled one")
        row = TokenRun.of(sample.ids, sample.media)
        length = len(row)
        shared = _NONE if tree is None else tree.shared(row)
        new = length - len(shared)
        # Without this a long prompt that nearly fills a micro-batch would be computed again for each of its answers.
        room = max(max_tokens, 2 * length) if 2 * new <= length else max_tokens
        if not batches or batches[-1].tokens + new > room:
            batches.append(MicroBatch())
            tree, shared, new = None, _NONE, length
        if tree is None or new == length:
            tree = Tree()
            batches[-1].trees.append(tree)
        offset = batches[-1].tokens - len(tree)
        tree.add(row, shared)
        batches[-1].samples.append((sample, offset, tree.paths[-1]))
    return batches
