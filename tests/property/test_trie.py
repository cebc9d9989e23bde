"""Any calls, in any order, with or without what is known of their parents: one trie, the one that a dictionary gives.

The oracle knows nothing of nodes: it is the set of all beginnings of what the engine saw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from palestra.tokens import TokenTrie
from palestra.types.calls import Chat
from property.calls import Drawn, Edge, edges, episodes, orders, record, spans

pytestmark = pytest.mark.ci

Beginning = tuple[Edge, ...]


def order_of(path: Beginning) -> list[tuple[int, str]]:
    return [(token, digest or "") for token, digest in path]


def oracle(calls: Sequence[Drawn], index_of: dict[int, int]) -> tuple[list, dict]:
    """Nodes as (depth, tokens, the first call, who sampled them from which place on), and where each call ends."""
    beginnings = {call.edges[:n] for call in calls for n in range(1, len(call.edges) + 1)}
    followers: dict[Beginning, int] = {}
    for beginning in beginnings:
        followers[beginning[:-1]] = followers.get(beginning[:-1], 0) + 1
    cuts = {b for b in beginnings if followers.get(b, 0) != 1}
    cuts |= {call.prompt for call in calls} | {call.edges for call in calls}
    nodes, ends = [], {}
    for end in sorted(cuts, key=order_of):
        start = max((n for n in range(1, len(end)) if end[:n] in cuts), default=0)
        through = [call for call in calls if call.edges[: len(end)] == end]
        sampled = [(index_of[call.number], start - len(call.prompt)) for call in through if len(call.prompt) <= start]
        nodes.append((start, end[start:], min(index_of[call.number] for call in through), sorted(sampled)))
        ends |= {index_of[call.number]: len(nodes) - 1 for call in calls if call.edges == end}
    return nodes, ends


def written(trie: TokenTrie) -> tuple[list, dict]:
    """The same of the real one."""
    nodes = list(trie.nodes())
    place = {id(node): n for n, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        above = node.parent
        assert above is not None
        assert above.stop == node.start
        assert above.children[int(node.edges[0])] is node
        label = None if node.chat is None else node.chat.index
        sampled = [(sampling.chat.index, sampling.start) for sampling in node.samplings]
        rows.append((node.start, (*zip(node.ids.tolist(), trie.digests(node), strict=True),), label, sampled))
    return rows, {index: place[id(trie.end(index))] for index in trie.chats}


def index_of(chats: dict[int, Chat]) -> dict[int, int]:
    return {number: chat.index for number, chat in chats.items()}


@given(st.data())
@examples(20, 150)
def test_any_calls_in_any_order_give_the_trie_of_their_beginnings(data):
    calls = data.draw(episodes())
    orphans = data.draw(st.sets(st.sampled_from([call.number for call in calls])))
    chats = record(calls, data.draw(orders(calls)), orphans)
    arrival = data.draw(st.permutations(sorted(chats)))  # children also before their parents
    trie = TokenTrie(chats[number] for number in arrival)
    assert written(trie) == oracle(calls, index_of(chats))
    assert len(trie) == len({call.edges[:n] for call in calls for n in range(1, len(call.edges) + 1)})
    assert trie.chats == sorted(chat.index for chat in chats.values())
    assert trie.has_media or not any(digest for call in calls for _, digest in call.edges)


@given(st.data())
def test_a_parent_that_is_known_changes_nothing_but_the_work(data):
    calls = data.draw(episodes())
    order = data.draw(orders(calls))
    known = record(calls, order)
    unknown = record(calls, order, orphans=range(len(calls)))
    whole = written(TokenTrie(known[number] for number in order))
    assert whole == written(TokenTrie(unknown[number] for number in order))
    assert whole == written(TokenTrie(known[number] for number in reversed(order)))


@given(st.data())
def test_adding_a_call_again_changes_nothing(data):
    calls = data.draw(episodes())
    chats = record(calls)
    trie = TokenTrie(chats.values())
    before = written(trie)
    for number in data.draw(st.lists(st.sampled_from(sorted(chats)), min_size=1)):
        trie.add(chats[number])
    assert written(trie) == before


@given(st.data())
def test_every_stage_of_a_growing_trie_is_the_trie_of_what_is_there(data):
    calls = data.draw(episodes())
    chats = record(calls, data.draw(orders(calls)))
    trie = TokenTrie()
    there: list[int] = []
    for number in data.draw(st.permutations(sorted(chats))):
        trie.add(chats[number])
        there.append(number)
        assert written(trie) == oracle([calls[n] for n in there], index_of({n: chats[n] for n in there}))


@given(episodes())
def test_the_way_to_a_calls_end_is_its_prompt_and_completion(calls):
    chats = record(calls)
    trie = TokenTrie(chats.values())
    for number, chat in chats.items():
        path = trie.end(chat.index).path()
        assert np.concatenate([node.ids for node in path]).tolist() == chat.ids.tolist()
        assert chat.ids.tolist() == [*chat.prompt_ids.tolist(), *calls[number].completion]
        assert [digest for node in path for digest in trie.digests(node)] == [d for _, d in calls[number].edges]


@given(episodes())
def test_every_leaf_is_a_calls_end(calls):
    trie = TokenTrie(record(calls).values())
    ends = {id(trie.end(index)) for index in trie.chats}
    assert all(node.children or id(node) in ends for node in trie.nodes())


@given(st.data())
@examples(20, 150)
def test_the_longest_common_beginning_is_found_and_the_first_call_that_has_it(data):
    calls = data.draw(episodes())
    chats = record(calls, data.draw(orders(calls)))
    trie = TokenTrie(chats[number] for number in data.draw(st.permutations(sorted(chats))))
    start = data.draw(st.just(()) | st.sampled_from(calls).map(lambda call: call.edges))
    kept = data.draw(st.integers(0, len(start)))
    wanted = (*start[:kept], *data.draw(st.lists(edges, max_size=3)))

    def common(call: Drawn) -> int:
        return max(n for n in range(len(wanted) + 1) if call.edges[:n] == wanted[:n])

    most = max(map(common, calls))
    first = min(chats[call.number].index for call in calls if common(call) == most) if most else None
    ids = np.array([token for token, _ in wanted], np.int32)
    found, matched = trie.longest(ids, spans(wanted, 0))
    assert (None if found is None else found.index, matched) == (first, most)
