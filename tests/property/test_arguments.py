"""Arguments of tool calls are the same where Python's own reader gives the same values, read without rounding."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.session.arguments import arguments_key

numbers = st.one_of(
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 1, 10, 2**53, 2**53 + 1, 2**63, 2**64, 2**64 + 1]),
).map(str) | st.builds(
    lambda sign, whole, fraction, exponent: f"{sign}{whole}{fraction}{exponent}",
    st.sampled_from(["", "-"]),
    st.integers(0, 10**20),
    st.from_regex(r"(\.[0-9]{1,20})?", fullmatch=True),
    st.from_regex(r"([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
strings = st.text(max_size=4).map(json.dumps) | st.sampled_from(['"\\u00e9"', '"é"', '"n1e20"', '"s"', '"1.5"'])
scalars = numbers | strings | st.sampled_from(["true", "false", "null"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + " , ".join(items) + "]")
        | st.lists(st.tuples(strings, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=6,
)


def meaning(text: str) -> object:
    """The value, with numbers as exact fractions, apart from strings and from True and False."""

    def freeze(value: object) -> object:
        if isinstance(value, dict):
            return "object", frozenset((key, freeze(inner)) for key, inner in value.items())
        if isinstance(value, list):
            return "array", tuple(map(freeze, value))
        return type(value).__name__, value

    return freeze(json.loads(text, parse_int=Decimal, parse_float=Decimal))


@pytest.mark.slow
@given(values, values)
def test_two_texts_have_one_key_where_they_have_one_meaning(one, other):
    assert (arguments_key(one) == arguments_key(other)) == (meaning(one) == meaning(other))


@given(values)
def test_a_library_that_reads_and_writes_small_numbers_changes_no_key(text):
    value = json.loads(text)
    if value == json.loads(text, parse_int=Decimal, parse_float=Decimal):  # no float was rounded
        again = json.dumps(value, indent=2, sort_keys=True)
        assert arguments_key(again) == arguments_key(text)


@given(numbers, st.integers(0, 40), st.integers(1, 9))
def test_a_number_that_differs_in_any_digit_has_another_key(number, place, change):
    digits = [n for n, character in enumerate(number) if character.isdigit()]
    at = digits[place % len(digits)]
    other = number[:at] + str((int(number[at]) + change) % 10) + number[at + 1 :]
    try:
        same = Decimal(number) == Decimal(other) and json.loads(other) is not None
    except ValueError:  # a leading zero: no JSON
        same = False
    assert (arguments_key(f"[{number}]") == arguments_key(f"[{other}]")) == same


@given(strings, numbers)
def test_a_string_is_never_a_number(string, number):
    assert arguments_key(f"[{string}, 1.5]") != arguments_key(f"[{number}, 1.5]")
