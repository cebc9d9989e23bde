"""Rows of any tree of calls: each sampled token stands in exactly one row, and rows are what the engine saw."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat

from palestra.trajectory import rows_of

tokens = st.integers(1, 3)  # few, so that unrelated calls look alike


@st.composite
def episodes(draw):
    """Calls of which each extends any earlier one, or none; extensions may come twice from one call."""
    chats = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.sampled_from(chats)) if chats else None
        new = draw(st.lists(tokens, min_size=1, max_size=3))
        completion = draw(st.lists(tokens, min_size=1, max_size=3))
        logprobs = [-(100.0 * index + i) for i in range(len(completion))]  # which call, which token
        chats.append(
            make_chat(
                index=index,
                parent=parent,
                prompt=new,
                completion=completion,
                logprobs=logprobs,
                agent=draw(st.sampled_from(["a", "b"])),
            )
        )
    return chats


@given(episodes())
def test_every_sampled_token_is_in_exactly_one_row(chats):
    found = sorted(float(p) for row in rows_of(chats) for p in row.logprobs[row.sampled])
    assert found == sorted(float(p) for chat in chats for p in chat.logprobs)


@given(episodes())
def test_rows_are_prompt_and_completion_exactly_as_the_engine_saw_them(chats):
    seen = {float(chat.logprobs[0]): (chat.prompt_ids, chat.completion_ids) for chat in chats}
    for row in rows_of(chats):
        calls = [float(p) for p in row.logprobs[row.sampled] if float(p) in seen]
        for first in calls:
            prompt, completion = seen[first]
            start = len(prompt)
            assert row.ids[: start + len(completion)].tolist() == [*prompt.tolist(), *completion.tolist()]
            assert row.sampled[start : start + len(completion)].all()
            assert float(row.logprobs[start]) == first
        prompt, completion = seen[calls[-1]]
        assert len(row.ids) == len(prompt) + len(completion)


@given(episodes())
def test_what_was_not_sampled_in_this_row_has_neither_logprob_nor_version(chats):
    for row in rows_of(chats):
        assert (np.isnan(row.logprobs) == ~row.sampled).all()
        assert ((row.versions[:, 0] < 0) == ~row.sampled).all()
        assert not row.sampled[0]


@given(episodes())
def test_a_row_has_one_agent_and_chains_without_forks_are_one_row(chats):
    rows = rows_of(chats)
    by_index = {chat.index: chat for chat in chats}
    extended = set()
    wanted = 0
    for chat in chats:  # a row begins where a call goes on from nothing, from another agent's, or from a call used up
        if chat.parent is None or by_index[chat.parent].agent != chat.agent or chat.parent in extended:
            wanted += 1
        else:
            extended.add(chat.parent)
    assert len(rows) == wanted


@given(episodes(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_in_the_list_changes_nothing(chats, random):
    shuffled = list(chats)
    random.shuffle(shuffled)
    for a, b in zip(rows_of(chats), rows_of(shuffled), strict=True):
        assert (a.ids == b.ids).all()
        assert (a.sampled == b.sampled).all()
