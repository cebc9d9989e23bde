from __future__ import annotations

from dataclasses import replace

import numpy as np

from palestra.types.calls import PolicyVersion, SamplingParams, VersionSpan
from unit.building import make_chat, rows_of


def sampled_ids(row) -> list[int]:
    return row.ids[row.loss_mask].tolist()


def test_no_calls_have_no_rows():
    assert rows_of([]) == []


def test_one_call_is_one_row_with_its_completion_sampled():
    (row,) = rows_of([make_chat(prompt=(1, 2, 3), completion=(4, 5), logprobs=[-0.25, -2.0])])
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert np.isnan(row.logprobs[:3]).all()
    assert row.logprobs[3:].tolist() == [-0.25, -2.0]
    assert row.versions.tolist() == [[-1, -1]] * 3 + [[0, 0]] * 2
    assert (row.ids.dtype, row.loss_mask.dtype, row.logprobs.dtype, row.versions.dtype) == (
        np.int32,
        np.bool_,
        np.float32,
        np.int32,
    )


def test_a_call_that_goes_on_extends_the_row():
    first = make_chat(prompt=(1,), completion=(2, 3), logprobs=[-1, -2])
    second = make_chat(index=1, parent=first, prompt=(4, 5), completion=(6,), logprobs=[-3])
    (row,) = rows_of([first, second])
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sampled_ids(row) == [2, 3, 6]
    assert row.logprobs[row.loss_mask].tolist() == [-1, -2, -3]


def test_the_order_in_which_calls_are_given_does_not_matter():
    first = make_chat(prompt=(1,), completion=(2,))
    second = make_chat(index=1, parent=first, prompt=(3,), completion=(4,))
    other = make_chat(index=2, prompt=(9,), completion=(8,))
    rows = rows_of([other, second, first])
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [9, 8]]


def test_a_fork_is_a_new_row_in_which_what_was_sampled_before_is_context():
    first = make_chat(prompt=(1,), completion=(2,))
    left = make_chat(index=1, parent=first, prompt=(3,), completion=(4,))
    right = make_chat(index=2, parent=first, prompt=(5,), completion=(6,))
    after = make_chat(index=3, parent=right, prompt=(7,), completion=(8,))
    rows = rows_of([first, left, right, after])
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 5, 6, 7, 8]]
    assert [sampled_ids(row) for row in rows] == [[2, 4], [6, 8]]


def test_only_ids_decide_not_what_the_store_knows_of_them():
    first = make_chat(prompt=(1,), completion=(2,))
    rendered_afresh = make_chat(index=1, prompt=(1, 2, 3), completion=(4,))
    other_ids = make_chat(index=2, prompt=(1, 3), completion=(5,))
    assert [sampled_ids(r) for r in rows_of([first, rendered_afresh, other_ids])] == [[2, 4], [5]]


def test_a_call_that_keeps_only_a_part_of_its_parent_begins_a_row():
    first = make_chat(prompt=(1,), completion=(2, 3))
    part = replace(make_chat(index=1, parent=first, prompt=(9,), completion=(4,)), shared=2)
    after = make_chat(index=2, parent=first, prompt=(5,), completion=(6,))
    rows = rows_of([first, part, after])
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 5, 6], [1, 2, 9, 4]]
    assert [sampled_ids(row) for row in rows] == [[2, 3, 6], [4]]


def test_another_policy_is_a_row_of_its_own_and_another_agent_is_not():
    first = make_chat(prompt=(1,), completion=(2,))
    other = make_chat(index=1, parent=first, prompt=(3,), completion=(4,), policy="other")
    assert [(row.policy, row.ids.tolist(), sampled_ids(row)) for row in rows_of([first, other])] == [
        ("other", [1, 2, 3, 4], [4]),
        ("policy", [1, 2], [2]),
    ]
    critic = make_chat(index=1, parent=first, prompt=(3,), completion=(4,), agent="critic")
    assert [sampled_ids(row) for row in rows_of([first, critic])] == [[2, 4]]


def test_every_token_has_the_temperature_and_the_call_that_sampled_it():
    first = make_chat(prompt=(1,), completion=(2,))
    warmer = SamplingParams(temperature=0.5, max_tokens=4, seed=1)
    (row,) = rows_of([first, make_chat(index=1, parent=first, prompt=(3,), completion=(4,), sampling=warmer)])
    assert row.temperatures.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert row.calls.tolist() == [-1, 0, -1, 1]


def test_a_token_that_two_calls_sampled_is_trained_for_both():
    first = make_chat(prompt=(1, 2), completion=(3, 4), logprobs=[-1, -2])
    same = make_chat(index=1, prompt=(1, 2), completion=(3, 5), logprobs=[-3, -4])
    rows = rows_of([first, same])
    assert sorted(p for row in rows for p in row.logprobs[row.loss_mask].tolist()) == [-4, -3, -2, -1]
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 5]]
    again = make_chat(index=2, prompt=(1, 2), completion=(3, 5), logprobs=[-5, -6])
    rows = rows_of([first, same, again])
    assert [row.logprobs[row.loss_mask].tolist() for row in rows] == [[-1, -2], [-3, -4], [-5, -6]]


def test_what_is_not_trained_is_context_and_its_rows_are_not_made():
    first = make_chat(prompt=(1,), completion=(2,))
    left = make_chat(index=1, parent=first, prompt=(3,), completion=(4,))
    right = make_chat(index=2, parent=first, prompt=(5,), completion=(6,))
    (row,) = rows_of([first, left, right], trained={2})
    assert (row.ids.tolist(), sampled_ids(row)) == ([1, 2, 5, 6], [6])


def test_every_token_has_the_version_that_sampled_it():
    spans = (VersionSpan(PolicyVersion(0, 4), 1), VersionSpan(PolicyVersion(1, 5), 2))
    (row,) = rows_of([make_chat(prompt=(1,), completion=(2, 3, 4), versions=spans)])
    assert row.versions.tolist() == [[-1, -1], [0, 4], [1, 5], [1, 5]]
