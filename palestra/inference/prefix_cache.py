"""Keys and values of what was computed before, found by the longest beginning that a new prompt has in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
from torch import Tensor

from palestra.schemas.records import Ids
from palestra.trajectory import common_prefix


class _Node:
    """A run of tokens with its keys and values; what comes before it is in its ancestors."""

    __slots__ = ("children", "ids", "keys", "parent", "used")

    def __init__(self, parent: _Node | None, ids: Ids, keys: Tensor | None) -> None:
        self.parent, self.ids, self.keys = parent, ids, keys
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixCache:
    """The prefixes of one policy and version, in at most `capacity` tokens; what was used longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0  # that are kept
        self._root = _Node(None, np.empty(0, np.int32), None)
        self._clock = count(1)

    def copy_into(self, keys: Tensor, ids: Ids) -> int:
        """Copy the keys and values of the longest known beginning of `ids`; returns its length.

        Args:
            keys: [layers, 2, key heads, at least len(ids), head dim], filled from position 0.
            ids: [N].
        """
        done = 0
        for node, common in self._path(ids):
            assert node.keys is not None
            keys[:, :, :, done : done + common] = node.keys[:, :, :, :common]
            done += common
        return done

    def insert(self, ids: Ids, keys: Tensor) -> None:
        """Keep what is not there yet of `keys`, [layers, 2, key heads, len(ids), head dim]; it is copied."""
        node, done = self._root, 0
        for found, common in self._path(ids):
            node, done = found, done + common
            if common < len(found.ids):
                node = _split(found, common)
        if done < len(ids) and len(ids) - done <= self.capacity:
            self.shrink(self.capacity - (len(ids) - done), but=node)
            new = _Node(node, ids[done:].copy(), keys[:, :, :, done:].clone())
            new.used = next(self._clock)
            node.children[int(new.ids[0])] = new
            self.tokens += len(new.ids)

    def shrink(self, tokens: int, but: _Node | None = None) -> None:
        """Forget leaves, those that were used longest ago first, until at most so many tokens are left."""
        while self.tokens > max(tokens, 0):
            leaves = [leaf for leaf in self._leaves() if leaf is not but]
            if not leaves:
                return
            oldest = min(leaves, key=lambda leaf: leaf.used)
            assert oldest.parent is not None
            del oldest.parent.children[int(oldest.ids[0])]
            self.tokens -= len(oldest.ids)

    def _path(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """The nodes that begin `ids`, each with how many of its tokens do."""
        node, done, now = self._root, 0, next(self._clock)
        while done < len(ids):
            child = node.children.get(int(ids[done]))
            if child is None:
                return
            common = common_prefix(child.ids, ids[done:])
            child.used = now
            whole = common == len(child.ids)
            yield child, common
            if not whole:
                return
            node, done = child, done + common

    def _leaves(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack.extend(node.children.values())


def _split(node: _Node, common: int) -> _Node:
    """Cut a node in two; returns the upper part. Both get memory of their own, so that each can be forgotten."""
    parent, keys = node.parent, node.keys
    assert parent is not None
    assert keys is not None
    upper = _Node(parent, node.ids[:common], keys[:, :, :, :common].clone())
    upper.used = node.used
    parent.children[int(upper.ids[0])] = upper
    node.parent, node.ids, node.keys = upper, node.ids[common:], keys[:, :, :, common:].clone()
    upper.children[int(node.ids[0])] = node
    return upper
