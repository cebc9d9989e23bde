"""Rows of any calls: each sampled token is trained in exactly one row, and rows are beginnings of what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import make_chat, rows_of

from palestra.types.calls import SamplingParams
from palestra.types.records import TrainSample
from property.calls import Drawn, Edge, digests_of, episodes, orders, record


def edges_of(row: TrainSample) -> tuple[Edge, ...]:
    return (*zip(row.ids.tolist(), digests_of(row.media, len(row.ids)), strict=True),)


def draw_trained(data, calls: Sequence[Drawn]) -> set[int]:
    return data.draw(st.just({c.number for c in calls}) | st.sets(st.sampled_from([c.number for c in calls])))


@given(st.data())
@examples(20, 150)
def test_every_sampled_token_is_trained_in_exactly_one_row_with_what_was_recorded_of_it(data):
    calls = data.draw(episodes())
    trained = draw_trained(data, calls)
    chats = record(calls, data.draw(orders(calls)))
    by_index = {chat.index: number for number, chat in chats.items()}
    found: Counter[tuple[int, int]] = Counter()
    for row in rows_of(chats.values(), {chats[number].index for number in trained}):
        for position in np.flatnonzero(row.loss_mask).tolist():
            call = calls[by_index[int(row.calls[position])]]
            place = position - len(call.prompt)
            found[call.number, place] += 1
            assert edges_of(row)[: position + 1] == call.edges[: position + 1]
            assert row.policy == call.policy
            assert row.logprobs[position] == call.logprobs[place]
            assert row.temperatures[position] == call.temperature
            versions = [span.version for span in call.versions for _ in range(span.tokens)]
            assert tuple(row.versions[position]) == versions[place]
    assert found == Counter({(n, place): 1 for n in trained for place in range(len(calls[n].completion))})


@given(st.data())
def test_a_row_is_the_beginning_of_a_call_of_its_policy_and_ends_with_a_token_that_it_trains(data):
    calls = data.draw(episodes())
    trained = draw_trained(data, calls)
    for row in rows_of(record(calls).values(), trained):
        assert row.loss_mask[-1]
        assert any(
            call.edges[: len(row.ids)] == edges_of(row)
            for call in calls
            if call.policy == row.policy and call.number in trained
        )


@given(st.data())
def test_what_was_not_sampled_in_this_row_has_neither_logprob_nor_version_nor_call(data):
    calls = data.draw(episodes())
    for row in rows_of(record(calls).values(), draw_trained(data, calls)):
        n = len(row.ids)
        assert {len(a) for a in (row.loss_mask, row.logprobs, row.versions, row.temperatures, row.calls)} == {n}
        assert np.isnan(row.logprobs[~row.loss_mask]).all()
        assert not np.isnan(row.logprobs[row.loss_mask]).any()
        assert (row.versions[~row.loss_mask] == -1).all()
        assert (row.calls[~row.loss_mask] == -1).all()
        assert (row.temperatures[~row.loss_mask] == 1).all()
        assert not row.loss_mask[0]


def fewest(calls: Sequence[Drawn], policy: str, trained: Collection[int]) -> int:
    """A token that k calls sampled needs k rows that pass it; a row that passes a token passes those before it."""
    samples: Counter[tuple[Edge, ...]] = Counter()
    for call in calls:
        if call.policy == policy and call.number in trained:
            samples.update(call.edges[: n + 1] for n in range(len(call.prompt), len(call.edges)))
    needed: Counter[tuple[Edge, ...]] = Counter()
    for beginning in sorted({b[:n] for b in samples for n in range(len(b) + 1)}, key=len, reverse=True):
        needed[beginning] = max(needed[beginning], samples[beginning])
        if beginning:
            needed[beginning[:-1]] += needed[beginning]
    return needed[()]


@given(st.data())
@examples(20, 150)
def test_there_are_as_few_rows_as_flat_rows_allow(data):
    calls = data.draw(episodes())
    trained = draw_trained(data, calls)
    found = Counter(row.policy for row in rows_of(record(calls).values(), trained))
    assert found == Counter({policy: fewest(calls, policy, trained) for policy in "pq"})


@given(st.data())
def test_where_nothing_was_sampled_twice_there_is_a_row_for_each_last_sampled_token(data):
    calls = data.draw(episodes(policies=("p",)))
    sampled = Counter(call.edges[: n + 1] for call in calls for n in range(len(call.prompt), len(call.edges)))
    twice = {beginning for beginning, times in sampled.items() if times > 1}
    once = [call for call in calls if not any(call.edges[:n] in twice for n in range(len(call.edges) + 1))]
    whole = [call.edges for call in once]
    last = [w for w in whole if not any(o[: len(w)] == w and len(o) > len(w) for o in whole)]
    rows = rows_of(record(calls).values(), {call.number for call in once})
    assert sorted(map(edges_of, rows), key=str) == sorted(last, key=str)


@given(st.data())
@examples(20, 150)
def test_neither_the_order_of_arrival_nor_the_indices_change_the_rows(data):
    calls = data.draw(episodes())
    trained = draw_trained(data, calls)
    some = record(calls)
    orphans = data.draw(st.sets(st.sampled_from([call.number for call in calls])))
    others = record(calls, data.draw(orders(calls)), orphans)
    arrival = data.draw(st.permutations(sorted(others)))
    one = rows_of(some.values(), {some[n].index for n in trained})
    other = rows_of([others[n] for n in arrival], {others[n].index for n in trained})
    name = {chat.index: number for number, chat in others.items()} | {-1: -1}
    for a, b in zip(one, other, strict=True):
        assert (a.policy, edges_of(a)) == (b.policy, edges_of(b))
        for field in ("loss_mask", "logprobs", "versions", "temperatures"):
            assert getattr(a, field).tobytes() == getattr(b, field).tobytes(), field
        assert a.calls.tolist() == [name[index] for index in b.calls.tolist()]


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=2, max_size=6, unique_by=tuple))
def test_attempts_at_one_prompt_that_end_apart_are_each_whole_in_a_row(completions):
    chats = [
        make_chat(
            index=n,
            prompt=(1, 2),
            completion=[*completion, 9],
            logprobs=[-float(n + 1)] * (len(completion) + 1),
            sampling=SamplingParams(temperature=1.0, max_tokens=9, seed=-n),
        )
        for n, completion in enumerate(completions)
    ]
    rows = rows_of(chats)
    assert len(rows) == len(chats)
    assert all(len(set(row.logprobs[row.loss_mask].tolist())) == 1 for row in rows)
    assert all(row.loss_mask[2:].all() for row in rows)
