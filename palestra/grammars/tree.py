"""Grammars of few replies, such as the moves of a game: all places of all replies, found once when it is compiled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palestra.errors import InvalidRequest
from palestra.grammars.matcher import Matcher

MOST_TREE_TOKENS = 2**18  # of all trees that are kept; one takes about 100 bytes


class GrammarTree:
    """The places in the replies of a grammar, as a tree: from each, the tokens that may follow and where they lead.

    A reply of such a grammar needs no `llguidance`, and the grammar costs a few hundred bytes.
    """

    def __init__(self, nodes: Sequence[Sequence[tuple[int, int]]], mask_bytes: int) -> None:
        """Take over the tree that was found when the grammar was compiled.

        Args:
            nodes: for each place the tokens that may follow, each with the number of the place after it, -1 after
                the token that ends a reply; the first place is the beginning of a reply.
            mask_bytes: length of a mask, ceil(V / 32) x 4.
        """
        # Nothing follows the end of a reply: it is the last place, which -1 names.
        self._nodes = [*({int(token): int(after) for token, after in node} for node in nodes), {}]
        self._mask_bytes = mask_bytes

    @property
    def size(self) -> int:
        """Return the number of tokens that may follow, at all places together."""
        return sum(map(len, self._nodes))

    def mask(self, node: int) -> bytes:
        """Return the tokens that may follow at a place, a bit for each token; after the end of a reply, none."""
        bits = np.zeros(self._mask_bytes, np.uint8)
        for token in self._nodes[node]:
            bits[token >> 3] |= 1 << (token & 7)
        return bits.tobytes()

    def after(self, node: int, token: int) -> int:
        """Return the place that a token leads to, or -1 for the end of the reply.

        Raises:
            InvalidRequest: the token may not follow there.
        """
        following = self._nodes[node]
        if token not in following:
            raise InvalidRequest(f"token {token} does not satisfy the grammar")
        return following[token]

    def walk(self, tokens: Sequence[int], wanted: Sequence[int]) -> NDArray[np.int32]:
        """Return the masks at some places of a reply, int32 [W, B]; see `Grammars.walk`.

        Args:
            wanted: ascending places from 0 to `len(tokens)`; place i is the one before token i.

        Raises:
            InvalidRequest: the tokens do not match the grammar.
        """
        nodes = [0]
        for token in tokens:
            nodes.append(self.after(nodes[-1], token))
        masks = bytearray().join(self.mask(nodes[place]) for place in wanted)  # writable, as torch wants it
        return np.frombuffer(masks, "<i4").reshape(-1, self._mask_bytes // 4)


class GrammarTrees:
    """The trees of grammars that are kept, by digest; those that were used least recently are forgotten first.

    Not safe for threads: its user holds a lock.
    """

    def __init__(self) -> None:
        self._trees: OrderedDict[bytes, GrammarTree] = OrderedDict()
        self._tokens = 0

    def get(self, key: bytes) -> GrammarTree | None:
        """Return the tree of a grammar; None: it is not kept."""
        tree = self._trees.get(key)
        if tree is not None:
            self._trees.move_to_end(key)
        return tree

    def keep(self, key: bytes, tree: GrammarTree) -> list[bytes]:
        """Keep the tree of a grammar, and return the digests of those that are forgotten for it.

        Args:
            tree: the newest one is kept however large it is.
        """
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
    """The position of one reply in a `GrammarTree`.

    Attributes:
        tree: of the grammar.
    """

    def __init__(self, tree: GrammarTree) -> None:
        super().__init__(tree.mask(0))
        self.tree, self._node = tree, 0

    def advance(self) -> None:
        """Accept the pending tokens and renew the mask.

        Raises:
            InvalidRequest: a token does not match the grammar.
        """
        for token in self.pending:
            self._node = self.tree.after(self._node, token)
        self.mask, self.pending = self.tree.mask(self._node), []

    def walk(self, tokens: Sequence[int], wanted: Sequence[int], keep: bool = True) -> NDArray[np.int32]:
        """Return the masks at some places of a reply; see `Matcher.walk`."""
        return self.tree.walk(tokens, wanted if keep else ())
