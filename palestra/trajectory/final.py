"""Which calls led to the final answers, and which were abandoned on the way."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.schemas.records import Chat
from palestra.trajectory.trie import TokenTrie


def calls_of_final_answers(trie: TokenTrie, chats: Sequence[Chat]) -> frozenset[int]:
    """Indices of the calls whose tokens stand in the last call of an agent, that call included.

    Left out are attempts that were not gone on from, and what was sampled before the history was rewritten.
    """
    last = {chat.agent: chat.index for chat in sorted(chats, key=lambda chat: chat.index)}
    kept = {id(node) for index in last.values() for node in trie.end(index).path()}
    return frozenset(chat.index for chat in chats if id(trie.end(chat.index)) in kept)
