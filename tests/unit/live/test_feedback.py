"""What feedback comes to: the last counts, a revocation takes back, and none is not 0."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from palestra.errors import InvalidRequest
from palestra_live.feedback import FeedbackBody, Lessons, checked_feedback, session_lessons, session_score


def rows(*given):
    return [SimpleNamespace(kind=kind, call=call, value=orjson.dumps(value)) for kind, call, value in given]


@pytest.mark.parametrize(
    ("given", "score"),
    [
        ([], None),
        ([("critique", None, "too long"), ("edit", 0, "so")], None),
        ([("score", None, 0.2), ("score", None, 0.7)], 0.7),
        ([("thumbs", None, "up"), ("thumbs", None, "down")], 0.0),
        ([("score", None, 0.2), ("revoke", None, True)], None),
        ([("score", None, 0.2), ("revoke", None, True), ("score", None, 0.4)], 0.4),
        ([("score", 0, 1.0), ("score", 1, 0.0), ("score", 1, 0.5)], 0.75),
        ([("score", 0, 1.0), ("score", None, 0.1)], 0.1),
        ([("score", None, 0.1), ("score", 0, 1.0)], 0.1),
        ([("score", 0, 1.0), ("score", 1, 0.0), ("revoke", 1, True)], 1.0),
        ([("score", 0, 1.0), ("score", None, 0.0), ("revoke", None, True)], None),
    ],
)
def test_the_score_of_a_session(given, score):
    assert session_score(rows(*given)) == score


@given(st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.floats(0, 1)), min_size=1))
def test_a_score_stays_between_0_and_1(scores):
    assert 0.0 <= session_score(rows(*(("score", call, value) for call, value in scores))) <= 1.0


BETTER = {"preferred": 0, "over": 1}
WORSE = {"preferred": 1, "over": 0}


@pytest.mark.parametrize(
    ("given", "lessons"),
    [
        ([("score", None, 0.5), ("critique", None, "too long")], Lessons({}, [])),
        ([("edit", None, "so"), ("edit", 0, "and"), ("edit", None, "no, so")], Lessons({None: "no, so", 0: "and"}, [])),
        ([("edit", 0, "a"), ("edit", 1, "b"), ("revoke", 1, True)], Lessons({0: "a"}, [])),
        ([("comparison", None, BETTER), ("comparison", None, WORSE)], Lessons({}, [(1, 0)])),
        ([("comparison", None, BETTER), ("revoke", 1, True)], Lessons({}, [])),
        ([("comparison", None, BETTER), ("edit", 3, "a"), ("revoke", 2, True)], Lessons({3: "a"}, [(0, 1)])),
        ([("comparison", None, BETTER), ("edit", 3, "a"), ("revoke", None, True)], Lessons({}, [])),
    ],
)
def test_the_last_edit_of_a_call_and_the_last_comparison_of_a_pair_are_learned_unless_revoked(given, lessons):
    assert session_lessons(rows(*given)) == lessons


def number_of(call, field):
    return int(call)


@pytest.mark.parametrize("score", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_score_is_a_number_from_0_to_1(score):
    with pytest.raises(InvalidRequest, match=r"number.*0.*1"):
        checked_feedback(FeedbackBody(id="f", session="s", score=score), number_of)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"score": 1.0, "edit": "so"},
        {"preferred": "a", "over": "a"},
        {"preferred": "0"},
        {"over": "0"},
        {"score": True},
        {"score": "1"},
        {"thumbs": "sideways"},
        {"revoke": False},
        {"edit": "x" * 65_537},
        {"mood": "good"},
    ],
)
def test_other_bodies_are_refused(body):
    with pytest.raises(ValidationError):
        FeedbackBody(id="f", session="s", **body)


def test_a_comparison_names_two_calls():
    found = checked_feedback(FeedbackBody(id="f", session="s", preferred="3", over="1"), number_of)
    assert (found.kind, found.value, found.call) == ("comparison", {"preferred": 3, "over": 1}, None)
