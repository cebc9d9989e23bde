"""Keys and values of earlier prompts and replies, found by the longest beginning that a new prompt has in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
from torch import Tensor

from palestra.tokens import TokenRun


class _PrefixNode:
    """A run of tokens with its keys and values; ancestors hold the tokens before it."""

    __slots__ = ("children", "keys", "parent", "tokens", "used")

    def __init__(self, parent: _PrefixNode | None, tokens: TokenRun, keys: Tensor | None) -> None:
        """Add a run of N tokens below `parent`; `keys` are [layers, 2, key heads, N, head dim], None at the root."""
        self.parent, self.tokens, self.keys = parent, tokens, keys
        self.children: dict[tuple[int, str | None], _PrefixNode] = {}  # by first token
        self.used = 0


class PrefixCache:
    """Prefixes of one policy and version, at most `capacity` tokens, with LRU eviction.

    Tokens are compared together with image digests, so different images never share keys and values.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Drop everything, for example after a weight update."""
        self.tokens = 0  # that are kept
        self._root = _PrefixNode(None, TokenRun(np.empty(0, np.int32)), None)
        self._clock = count(1)

    def copy_into(self, keys: Tensor, tokens: TokenRun) -> int:
        """Copy the keys and values of the longest cached prefix, and return its length in tokens. `keys` are [layers,
        2, key heads, at least N, head dim] for N tokens, filled from position 0.
        """
        done = 0
        for node, common in self._path(tokens):
            assert node.keys is not None
            keys[:, :, :, done : done + common] = node.keys[:, :, :, :common]
            done += common
        return done

    def insert(self, tokens: TokenRun, keys: Tensor) -> None:
        """Cache a copy of the keys and values that are not cached yet. `keys` are [layers, 2, key heads, N, head dim]
        for N tokens.
        """
        node, done = self._root, 0
        for found, common in self._path(tokens):
            node, done = found, done + common
            if common < len(found.tokens):
                node = _split(found, common)
        if done < len(tokens) and len(tokens) - done <= self.capacity:
            self.shrink(self.capacity - (len(tokens) - done), but=node)
            new = _PrefixNode(node, tokens[done:].copy(), keys[:, :, :, done:].clone())
            new.used = next(self._clock)
            node.children[new.tokens.first] = new
            self.tokens += len(new.tokens)

    def shrink(self, tokens: int, but: _PrefixNode | None = None) -> None:
        """Evict leaves, least recently used first, until at most `tokens` tokens are left; never the leaf `but`."""
        while self.tokens > max(tokens, 0):
            leaves = [leaf for leaf in self._leaves() if leaf is not but]
            if not leaves:
                return
            oldest = min(leaves, key=lambda leaf: leaf.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens.first]
            self.tokens -= len(oldest.tokens)

    def _path(self, tokens: TokenRun) -> Iterator[tuple[_PrefixNode, int]]:
        """Yield the nodes that match the beginning of `tokens`, each with the number of matching tokens."""
        node, done, now = self._root, 0, next(self._clock)
        while done < len(tokens):
            rest = tokens[done:]
            child = node.children.get(rest.first)
            if child is None:
                return
            common = child.tokens.common(rest)
            child.used = now
            whole = common == len(child.tokens)
            yield child, common
            if not whole:
                return
            node, done = child, done + common

    def _leaves(self) -> Iterator[_PrefixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack.extend(node.children.values())


def _split(node: _PrefixNode, common: int) -> _PrefixNode:
    """Cut a node in two and return the upper part. Each gets memory of its own, so that each can be dropped alone."""
    parent, keys = node.parent, node.keys
    assert parent is not None
    assert keys is not None
    upper, rest = (
        _PrefixNode(parent, node.tokens[:common], keys[:, :, :, :common].clone()),
        keys[:, :, :, common:].clone(),
    )
    upper.used = node.used
    parent.children[upper.tokens.first] = upper
    node.parent, node.tokens, node.keys = upper, node.tokens[common:], rest
    upper.children[node.tokens.first] = node
    return upper
