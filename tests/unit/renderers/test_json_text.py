from __future__ import annotations

import pytest

from palestra.renderers.tool_calls import object_text, read_object


def test_members_come_with_their_text_and_the_end_is_told():
    members, end = read_object('x {"a" : [1,  2] ,"b":{"c": "}"} } rest', 1)
    assert {key: (m.value, m.text) for key, m in members.items()} == {
        "a": ([1, 2], "[1,  2]"),
        "b": ({"c": "}"}, '{"c": "}"}'),
    }
    assert 'x {"a" : [1,  2] ,"b":{"c": "}"} } rest'[end:] == " rest"


def test_of_equal_keys_the_last_counts():
    assert read_object('{"a": 1, "a": 2}')[0]["a"].value == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a"}', '{"a":}', '{"a": 1,}', '{"a": 1', "{a: 1}", '{"a": Infinity}']
)
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        read_object(text)
    assert object_text(text) is None


@pytest.mark.parametrize(
    ("text", "found"), [("{}", "{}"), (' {"a": 1}\n', '{"a": 1}'), ("{} x", None), ("[" * 100000, None)]
)
def test_the_text_of_an_object_is_that_without_what_is_around_it(text, found):
    assert object_text(text) == found
