"""How many values the bytes of a message have is known before any of them is made."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.errors import InvalidRequest
from palestra.process.codec import encode
from palestra_bases.protocol import check_values


def values_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(one) for one in value.values())
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 1


JSON = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=400)
JSON = st.recursive(JSON, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.parametrize("repeats", [0, 15, 16, 31, 32, 255, 256, 70_000])
def test_values_of_any_length_are_counted(repeats):
    counted([b"x" * 9, "x" * repeats, b"y" * repeats, [None] * repeats, dict.fromkeys(map(str, range(repeats)))])


@given(JSON)
def test_values_are_counted_without_being_made(value):
    counted([b"x" * 200, value])


def counted(sent: Any) -> None:
    data, count = encode(sent), values_in(sent)
    assert len(data) > count
    check_values(data, count)
    with pytest.raises(InvalidRequest):
        check_values(data, count - 1)


@pytest.mark.parametrize("unit", [b"\x90", b"\x01", b"\x81\xa1x"])
def test_too_many_values_are_refused_before_they_are_made(unit):
    count = 2_000_000
    data = b"\xdd" + count.to_bytes(4, "big") + unit * count
    tracemalloc.start()
    with pytest.raises(InvalidRequest):
        check_values(data, 1_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_bytes_that_end_before_their_last_value_are_refused():
    with pytest.raises(InvalidRequest):
        check_values(b"\x92\xa9123456789", 5)
