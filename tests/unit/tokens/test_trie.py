"""The trie by examples; tests/property/test_trie.py has any calls in any order."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np

from palestra.tokens import TokenTrie
from palestra.types.calls import MediaSpan
from unit.building import ids, make_chat


def drawn(trie: TokenTrie) -> list[tuple]:
    """(tokens before it, its ids, first call, who sampled it and from which place of the completion)."""
    return [
        (n.start, n.ids.tolist(), n.chat.index, [(s.chat.index, s.start) for s in n.samplings]) for n in trie.nodes()
    ]


def test_an_empty_trie_has_nothing():
    trie = TokenTrie()
    assert (len(trie), trie.chats, list(trie.nodes()), trie.has_media) == (0, [], [], False)
    assert trie.longest(ids(1, 2)) == (None, 0)


def test_a_call_is_a_node_that_was_read_and_one_that_was_sampled():
    trie = TokenTrie([make_chat(prompt=(1, 2, 3), completion=(4, 5))])
    assert drawn(trie) == [(0, [1, 2, 3], 0, []), (3, [4, 5], 0, [(0, 0)])]
    assert trie.end(0).ids.tolist() == [4, 5]
    assert trie.end(0).ids.dtype == np.int32


def test_a_call_that_goes_on_adds_only_what_is_new():
    first = make_chat(prompt=(1,), completion=(2, 3))
    trie = TokenTrie([first, make_chat(index=1, parent=first, prompt=(4,), completion=(5,))])
    assert drawn(trie) == [(0, [1], 0, []), (1, [2, 3], 0, [(0, 0)]), (3, [4], 1, []), (4, [5], 1, [(1, 0)])]
    assert len(trie) == 5


def test_calls_part_where_their_tokens_do_also_within_a_reply():
    one = make_chat(prompt=(1, 2), completion=(3, 4, 5))
    other = make_chat(index=1, prompt=(1, 2), completion=(3, 9))
    for calls in ([one, other], [other, one]):
        assert drawn(TokenTrie(calls)) == [
            (0, [1, 2], 0, []),
            (2, [3], 0, [(0, 0), (1, 0)]),
            (3, [4, 5], 0, [(0, 1)]),
            (3, [9], 1, [(1, 1)]),
        ]


def test_what_one_call_sampled_another_may_have_read():
    sampled = make_chat(index=1, prompt=(1,), completion=(2, 3))
    read = make_chat(index=0, prompt=(1, 2), completion=(7,))
    for calls in ([sampled, read], [read, sampled]):
        assert drawn(TokenTrie(calls)) == [
            (0, [1], 0, []),
            (1, [2], 0, [(1, 0)]),
            (2, [3], 1, [(1, 1)]),
            (2, [7], 0, [(0, 0)]),
        ]


def test_a_child_may_come_before_its_parent():
    first = make_chat(prompt=(1,), completion=(2, 3))
    second = make_chat(index=1, parent=first, prompt=(4,), completion=(5,))
    trie = TokenTrie([second])
    assert drawn(trie) == [(0, [1, 2, 3, 4], 1, []), (4, [5], 1, [(1, 0)])]
    trie.add(first)
    assert drawn(trie) == drawn(TokenTrie([first, second]))


def test_a_part_of_a_parent_is_shared_in_the_middle_of_a_node():
    first = make_chat(prompt=(1, 2, 3), completion=(4, 5))
    for shared in range(6):
        part = replace(make_chat(index=1, parent=first, prompt=(9,), completion=(8,)), shared=shared)
        trie = TokenTrie([first, part])
        assert part.ids.tolist() == [*[1, 2, 3, 4, 5][:shared], 9, 8]
        assert np.concatenate([n.ids for n in trie.end(1).path()]).tolist() == part.ids.tolist()
        assert len(trie) == 5 + 2


def test_the_ends_of_calls_stay_theirs_when_a_later_one_cuts_the_node():
    long = make_chat(prompt=(1, 2, 3, 4), completion=(5, 6))
    short = make_chat(index=1, prompt=(1, 2), completion=(3,))
    trie = TokenTrie([long, short])
    assert [n.ids.tolist() for n in trie.end(0).path()] == [[1, 2], [3], [4], [5, 6]]
    assert [n.ids.tolist() for n in trie.end(1).path()] == [[1, 2], [3]]


def test_equal_ids_of_other_media_are_other_tokens():
    def looking(index: int, *spans: MediaSpan):
        return make_chat(index=index, prompt=(1, 7, 7, 2), completion=(3,), media=spans)

    calls = [
        looking(0, MediaSpan(1, 2, "cat")),
        looking(1, MediaSpan(1, 2, "dog")),
        looking(2),
        looking(3, MediaSpan(1, 1, "cat"), MediaSpan(2, 1, "dog")),
    ]
    trie = TokenTrie(calls)
    assert trie.has_media
    assert len(trie) == 1 + 3 * 4 + 3
    assert [n.start for n in trie.nodes() if not n.children] == [4] * 4
    for call, wanted in zip(calls, [["cat"] * 2, ["dog"] * 2, [None] * 2, ["cat", "dog"]], strict=True):
        path = trie.end(call.index).path()
        assert [d for n in path for d in trie.digests(n)] == [None, *wanted, None, None]
    assert trie.longest(ids(1, 7, 7, 9), [MediaSpan(1, 2, "dog")]) == (calls[1], 3)
    assert trie.longest(ids(1, 7, 7, 9), [MediaSpan(1, 2, "bird")]) == (calls[0], 1)


def test_media_reach_only_as_far_as_the_part_of_the_parent_that_is_shared():
    first = make_chat(prompt=(1, 7, 7, 7), completion=(2,), media=(MediaSpan(1, 3, "cat"),))
    part = replace(make_chat(index=1, parent=first, prompt=(7, 4), completion=(3,)), shared=2)
    for calls in ([first, part], [part, first]):  # from its parent, and by itself
        trie = TokenTrie(calls)
        assert [d for n in trie.end(1).path() for d in trie.digests(n)] == [None, "cat", None, None, None]


def test_the_longest_beginning_may_end_anywhere_and_belongs_to_the_first_call_that_has_it():
    one = make_chat(index=4, prompt=(1, 2, 3), completion=(4,))
    other = make_chat(index=2, prompt=(1, 2, 5), completion=(6,))
    trie = TokenTrie([one, other])
    assert trie.longest(ids(1, 2, 3, 4, 9)) == (one, 4)
    assert trie.longest(ids(1, 2, 3)) == (one, 3)
    assert trie.longest(ids(1, 2)) == (other, 2)
    assert trie.longest(ids(1, 2, 9)) == (other, 2)
    assert trie.longest(ids(9)) == (None, 0)
    assert trie.longest(ids()) == (None, 0)


def test_children_are_in_order_of_ids_then_digests_whatever_came_first():
    def begins(index: int, token: int, digest: str | None):
        media = () if digest is None else (MediaSpan(0, 1, digest),)
        return make_chat(index=index, prompt=(token,), completion=(1,), media=media)

    calls = [begins(0, 5, "b"), begins(1, 5, None), begins(2, 3, "z"), begins(3, 5, "a")]
    for order in (calls, calls[::-1]):
        trie = TokenTrie(order)
        assert [(n.ids[0], trie.digests(n)[0]) for n in trie.nodes() if n.start == 0] == [
            (3, "z"),
            (5, None),
            (5, "a"),
            (5, "b"),
        ]


def test_a_trie_of_many_turns_keeps_each_token_once_in_memory():
    chats = []
    for index in range(50):
        parent = chats[-1] if chats else None
        chats.append(make_chat(index=index, parent=parent, prompt=range(100), completion=[7] * 10))
    trie = TokenTrie(chats)
    assert len(trie) == 50 * 110
    owners = {id(n.edges if n.edges.base is None else n.edges.base): n.edges for n in trie.nodes()}
    assert sum(len(e if e.base is None else e.base) for e in owners.values()) == 50 * 110


def test_what_is_rendered_afresh_keeps_only_what_is_new_of_it():
    """Without a parent to start from the whole prompt is walked, but not kept."""
    chats = [make_chat(index=n, prompt=[*range(1000), n], completion=[7]) for n in range(20)]
    trie = TokenTrie(chats)
    owners = {id(n.edges if n.edges.base is None else n.edges.base): n.edges for n in trie.nodes()}
    assert sum(len(e if e.base is None else e.base) for e in owners.values()) == len(trie) == 1000 + 20 * 2


def test_a_trie_that_nobody_needs_is_gone_without_the_garbage_collector():
    first = make_chat(prompt=(1, 2, 3), completion=(4, 5))
    trie = TokenTrie([first, make_chat(index=1, parent=first, prompt=(6,), completion=(7,))])
    tokens = [weakref.ref(node.edges) for node in trie.nodes()]
    assert len(tokens) == 4
    gc.disable()
    try:
        del trie
        assert not [ref for ref in tokens if ref() is not None]
    finally:
        gc.enable()
