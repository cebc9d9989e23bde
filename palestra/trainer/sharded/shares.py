"""Splits the rows of a batch over ranks, about evenly by computed tokens.

A rank gets consecutive rows, so that rows of a group, which share a prompt, mostly stay together: a prompt that two
ranks need is computed twice. All rows of an episode are on one rank, because some losses need whole episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.tokens import TokenRun
from palestra.trainer.packing import Tree
from palestra.types.records import TrainSample

_TRIES = 10  # of finding the smallest limit, by halves


def share_out(batch: Sequence[TrainSample], ranks: int) -> list[list[TrainSample]]:
    """Return the rows of each rank, in order; a rank has none if there are fewer episodes than ranks."""
    episodes, rows = _episodes(batch), [TokenRun.of(sample.ids, sample.media) for sample in batch]
    low, high = 0, sum(map(len, rows))
    best = _filled(rows, episodes, high)
    for _ in range(_TRIES if len(episodes) > 1 else 0):
        limit = (low + high) // 2
        found = _filled(rows, episodes, limit)
        if len(found) <= ranks:
            high, best = limit, found
        else:
            low = limit
    shares = [list(batch[first:last]) for first, last in best]
    return shares + [[] for _ in range(ranks - len(shares))]


def _episodes(batch: Sequence[TrainSample]) -> list[tuple[int, int]]:
    """Return the ranges of rows that have to stay together: from the first row of an episode to its last."""
    last = {sample.episode_id: number for number, sample in enumerate(batch)}
    found, first, until = list[tuple[int, int]](), 0, 0
    for number, sample in enumerate(batch):
        until = max(until, last[sample.episode_id])
        if number == until:
            found.append((first, number + 1))
            first = number + 1
    return found


def _filled(rows: Sequence[TokenRun], episodes: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Return ranges of rows, each with as many whole episodes as fit into `limit` computed tokens, at least one."""
    found = list[tuple[int, int]]()
    tree, tokens = Tree(), 0
    for first, last in episodes:
        before = len(tree)
        _add(tree, rows[first:last])
        if found and len(tree) <= limit and tokens:
            found[-1] = (found[-1][0], last)
        else:
            if before:
                tree = Tree()
                _add(tree, rows[first:last])
            found.append((first, last))
        tokens = len(tree)
    return found


def _add(tree: Tree, rows: Sequence[TokenRun]) -> None:
    for row in rows:
        tree.add(row, tree.shared(row))
