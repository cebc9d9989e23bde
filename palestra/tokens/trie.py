"""`TokenTrie`: all calls of an episode, merged on their common prefixes.

A path from the root is a sequence of tokens that the engine processed. It is split into nodes where calls diverge, and
where a call's prompt or completion ends, so that all tokens of a node have the same origin: sampled by the same calls,
or by none. The trie does not depend on the order in which calls are added.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palestra.tokens.token_run import common_prefix
from palestra.types.calls import Chat, Ids, MediaSpan

Edges = NDArray[np.int64]  # [n] token id + (number of the media digest << 32)

_ID = (1 << 32) - 1


class Sampled(NamedTuple):
    """The call that sampled a node's tokens, and the index of the node's first token in that call's completion."""

    chat: Chat
    start: int


class TrieNode:
    """A run of n tokens. A node holds only the tokens after its parent's."""

    __slots__ = ("chat", "children", "edges", "parent", "samplings", "start")

    def __init__(self, parent: TrieNode | None, start: int, edges: Edges, chat: Chat | None) -> None:
        self.parent = parent
        self.start = start  # number of tokens before this node
        self.edges = edges
        self.chat = chat  # the first call with these tokens; None: the root
        self.children: dict[int, TrieNode] = {}  # by first edge
        self.samplings: list[Sampled] = []  # by index of the call; empty: tokens of prompts only

    def __len__(self) -> int:
        return len(self.edges)

    @property
    def stop(self) -> int:
        """Return the number of tokens from the root to the end of this node."""
        return self.start + len(self.edges)

    @property
    def ids(self) -> Ids:
        """Return the token ids of this node, int32 [n]."""
        return (self.edges & _ID).astype(np.int32)

    def path(self) -> list[TrieNode]:
        """Return the nodes from below the root to this one."""
        nodes: list[TrieNode] = []
        node: TrieNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class TokenTrie:
    """The calls of one episode as a trie of tokens.

    Adding a call costs time and memory in proportion to its new tokens, if its parent was added before it.
    """

    def __init__(self, chats: Iterable[Chat] = ()) -> None:
        self.root = TrieNode(None, 0, np.empty(0, np.int64), None)
        self._ends: dict[int, TrieNode] = {}  # by index of the call: the node of its last token
        self._digests: list[str | None] = [None]  # number 0: a token of text
        self._numbers: dict[str, int] = {}
        self._whole: deque[tuple[Ids, Chat]] = deque(maxlen=16)  # recent calls without a known parent
        for chat in chats:
            self.add(chat)

    def __len__(self) -> int:
        """Return the number of distinct tokens."""
        return sum(map(len, self.nodes()))

    @property
    def chats(self) -> list[int]:
        """Return the indices of the calls in the trie, sorted."""
        return sorted(self._ends)

    @property
    def has_media(self) -> bool:
        """Return whether any token is a placeholder of an image."""
        return len(self._digests) > 1

    def end(self, index: int) -> TrieNode:
        """Return the last node of a call, by index."""
        return self._ends[index]

    def digests(self, node: TrieNode) -> list[str | None]:
        """Return for each of a node's n tokens the digest of its media, or None for text."""
        return [self._digests[number] for number in (node.edges >> 32).tolist()]

    def nodes(self) -> Iterator[TrieNode]:
        """Iterate over all nodes below the root, parents first, children by token id and media digest."""
        stack = self._sorted(self.root)[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(self._sorted(node)[::-1])

    def add(self, chat: Chat) -> None:
        """Add a call; idempotent."""
        if chat.index in self._ends:
            return
        parent = None if chat.parent is None else self._ends.get(chat.parent.index)
        if parent is None:  # a first call, or one that was added before its parent
            ids, media = chat.prompt_ids, chat.all_media
            node, start = self.root, 0
            if not media:
                node, start = self._gone_on_from(ids, chat.index)
                self._whole.append((ids, chat))
            prompt, offset = self._edges(ids[start:], start, media), len(node)
        else:
            prompt, start = self._edges(chat.prompt_tail, chat.shared, chat.media), chat.shared
            node, offset = _place(parent, start)
        node = self._follow(node, offset, prompt, start, chat)
        below = node
        node = self._follow(node, len(node), self._edges(chat.completion_ids, 0, ()), chat.prompt_tokens, chat)
        self._ends[chat.index] = node
        while node is not below:
            insort(node.samplings, Sampled(chat, node.start - chat.prompt_tokens), key=lambda s: s.chat.index)
            assert node.parent is not None
            node = node.parent

    def __del__(self) -> None:
        self.clear()  # parents and children refer to each other, so only the garbage collector would free the calls

    def clear(self) -> None:
        """Remove all nodes and free their memory now: reference cycles would keep it for the garbage collector."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()
        self._ends.clear()
        self._whole.clear()

    def longest(self, ids: Ids, media: Sequence[MediaSpan] = ()) -> tuple[Chat | None, int]:
        """Return the first call with the longest common prefix with a sequence, and the prefix's length; (None, 0) if
        there is none. `ids` are int32 [N].
        """
        node, _, matched = self._walk(self.root, 0, self._edges(ids, 0, media))
        return (node.chat, matched) if matched else (None, 0)

    def _gone_on_from(self, ids: Ids, index: int) -> tuple[TrieNode, int]:
        """Return end node and length of the longest of the last 16 calls that `ids` [N] extends; a fast path."""
        known = [chat for prompt, chat in self._whole if chat.index < index and _starts_with(ids, prompt, chat)]
        if not known:
            return self.root, 0
        longest = max(known, key=lambda chat: chat.tokens)
        return self._ends[longest.index], longest.tokens

    def _follow(self, node: TrieNode, offset: int, edges: Edges, start: int, chat: Chat) -> TrieNode:
        """Walk along `edges` [E] from a position, create missing nodes, and return the last node."""
        node, offset, matched = self._walk(node, offset, edges, chat)
        if offset < len(node):
            node = _split(node, offset)
        if matched < len(edges):
            rest = edges[matched:].copy() if matched else edges  # a view would keep the whole array alive
            new = TrieNode(node, start + matched, rest, chat)
            node.children[int(new.edges[0])] = new
            node = new
        return node

    @staticmethod
    def _walk(node: TrieNode, offset: int, edges: Edges, chat: Chat | None = None) -> tuple[TrieNode, int, int]:
        """Walk from a position as far as `edges` [E] exist in the trie.

        `chat`, if given, becomes the first call of the nodes on the path if it is earlier. Returns the last node, how
        many of its tokens matched, and the number of matched edges.
        """
        matched = 0
        while matched < len(edges):
            if offset == len(node):
                child = node.children.get(int(edges[matched]))
                if child is None:
                    break
                node, offset = child, 0
            common = common_prefix(node.edges[offset:], edges[matched:])
            offset, matched = offset + common, matched + common
            if chat is not None and node.chat is not None and common and chat.index < node.chat.index:
                if offset < len(node):
                    node = _split(node, offset)
                node.chat = chat
            if offset < len(node):
                break
        return node, offset, matched

    def _edges(self, ids: Ids, start: int, media: Sequence[MediaSpan]) -> Edges:
        """Return the edges of tokens, int64 [N]: ids [N] with the number of the image above the lower 32 bits.

        `start` is the position of the first token, to which the spans in `media` refer.
        """
        edges = ids.astype(np.int64)
        for span in media:
            number = self._numbers.get(span.digest)
            if number is None:
                number = self._numbers[span.digest] = len(self._digests)
                self._digests.append(span.digest)
            edges[span.start - start : span.start - start + span.tokens] |= number << 32
        return edges

    def _sorted(self, node: TrieNode) -> list[TrieNode]:
        if len(node.children) < 2:
            return list(node.children.values())
        return sorted(node.children.values(), key=self._rank)

    def _rank(self, node: TrieNode) -> tuple[int, str]:
        first = int(node.edges[0])
        return first & _ID, self._digests[first >> 32] or ""


def _place(node: TrieNode, depth: int) -> tuple[TrieNode, int]:
    """Return the node on the path to `node` in which the first `depth` tokens end, and how many are its own."""
    while node.parent is not None and node.start >= depth:
        node = node.parent
    return node, depth - node.start


def _split(node: TrieNode, offset: int) -> TrieNode:
    """Cut a node in two and return the upper part. The lower part stays the end of the calls that end there."""
    above = node.parent
    assert above is not None
    upper = TrieNode(above, node.start, node.edges[:offset], node.chat)
    upper.samplings = list(node.samplings)
    above.children[int(upper.edges[0])] = upper
    node.parent, node.start, node.edges = upper, node.start + offset, node.edges[offset:]
    node.samplings = [Sampled(chat, start + offset) for chat, start in node.samplings]
    upper.children[int(node.edges[0])] = node
    return upper


def _starts_with(ids: Ids, prompt: Ids, chat: Chat) -> bool:
    """Return whether `ids` [N] begins with all tokens of a call with the prompt `prompt` [P]."""
    rest = ids[len(prompt) :]
    return _begins(rest, chat.completion_ids) and _begins(ids, prompt)  # completions are shorter, so they fail sooner


def _begins(ids: NDArray[Any], beginning: NDArray[Any]) -> bool:
    """Return whether `ids` [N] begins with `beginning` [M]."""
    return len(beginning) <= len(ids) and np.array_equal(ids[: len(beginning)], beginning)
