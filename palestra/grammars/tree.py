"""Grammars with few replies, such as the moves of a game: a tree of all positions, built once at compilation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palestra.errors import InvalidRequest
from palestra.grammars.matcher import Matcher

MOST_TREE_TOKENS = 2**18  # of all trees that are kept; one takes about 100 bytes


class GrammarTree:
    """A grammar's replies as a tree: for each position, the allowed tokens and the position after each.

    Such a grammar takes a few hundred bytes, and its replies need no `llguidance`.
    """

    def __init__(self, nodes: Sequence[Sequence[tuple[int, int]]], mask_bytes: int) -> None:
        """Create the tree from the compiler's result.

        Args:
            nodes: for each position the allowed tokens, each with the index of the next position, -1 after the token
                that ends a reply; replies start at position 0.
            mask_bytes: length of a mask, ceil(V / 32) x 4.
        """
        # Nothing follows the end of a reply: it is the last place, which -1 names.
        self._nodes = [*({int(token): int(after) for token, after in node} for node in nodes), {}]
        self._mask_bytes = mask_bytes

    @property
    def size(self) -> int:
        """Return the number of allowed tokens over all positions."""
        return sum(map(len, self._nodes))

    def mask(self, node: int) -> bytes:
        """Return the mask of allowed tokens at a position; after the end of a reply, no bit is set."""
        bits = np.zeros(self._mask_bytes, np.uint8)
        for token in self._nodes[node]:
            bits[token >> 3] |= 1 << (token & 7)
        return bits.tobytes()

    def after(self, node: int, token: int) -> int:
        """Return the position after a token, or -1 for the end of the reply."""
        following = self._nodes[node]
        if token not in following:
            raise InvalidRequest(f"token {token} does not satisfy the grammar")
        return following[token]

    def walk(self, tokens: Sequence[int], wanted: Sequence[int]) -> NDArray[np.int32]:
        """Return the masks at some positions of a reply, int32 [W, B]; see `Grammars.walk`.

        Args:
            wanted: ascending, from 0 to `len(tokens)`; position i is before token i.
        """
        nodes = [0]
        for token in tokens:
            nodes.append(self.after(nodes[-1], token))
        masks = bytearray().join(self.mask(nodes[place]) for place in wanted)  # writable, as torch wants it
        return np.frombuffer(masks, "<i4").reshape(-1, self._mask_bytes // 4)


class GrammarTrees:
    """A cache of trees by grammar digest; evicts the least recently used. Not thread-safe: callers hold a lock."""

    def __init__(self) -> None:
        self._trees: OrderedDict[bytes, GrammarTree] = OrderedDict()
        self._tokens = 0

    def get(self, key: bytes) -> GrammarTree | None:
        """Return the tree of a grammar, or None if it is not cached."""
        tree = self._trees.get(key)
        if tree is not None:
            self._trees.move_to_end(key)
        return tree

    def keep(self, key: bytes, tree: GrammarTree) -> list[bytes]:
        """Store the tree of a grammar and return the evicted digests; the newest tree is never evicted."""
        if (before := self._trees.pop(key, None)) is not None:
            self._tokens -= before.size
        self._trees[key] = tree
        self._tokens += tree.size
        forgotten = []
        while self._tokens > MOST_TREE_TOKENS and len(self._trees) > 1:
            oldest, gone = self._trees.popitem(last=False)
            self._tokens -= gone.size
            forgotten.append(oldest)
        return forgotten

    def __len__(self) -> int:
        return len(self._trees)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all trees."""
        return self._tokens


class TreeMatcher(Matcher):
    """A reply's position in a `GrammarTree`."""

    def __init__(self, tree: GrammarTree) -> None:
        super().__init__(tree.mask(0))
        self.tree, self._node = tree, 0

    def advance(self) -> None:
        """Accept the pending tokens and update the mask."""
        for token in self.pending:
            self._node = self.tree.after(self._node, token)
        self.mask, self.pending = self.tree.mask(self._node), []

    def walk(self, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks at some positions of a reply; see `Matcher.walk`."""
        return self.tree.walk(tokens, wanted if keep else ())
