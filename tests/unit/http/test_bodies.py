"""A body is refused before it is parsed where that would hold the interpreter for long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from palestra.errors import InvalidRequest
from palestra.http.bodies import MAX_CONTAINERS, MAX_KEYS, MAX_VALUES, parse_body


class Anything(BaseModel):
    value: Any


def parsed(value: Any) -> Any:
    return parse_body(Anything, json.dumps({"value": value}).encode()).value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("just", "over", "said"),
    [
        ([[]] * (MAX_CONTAINERS - 2), [[]] * (MAX_CONTAINERS - 1), f"more than {MAX_CONTAINERS} objects and lists"),
        (dict.fromkeys(range(MAX_KEYS - 1)), dict.fromkeys(range(MAX_KEYS)), f"more than {MAX_KEYS} keys"),
        ([0] * (MAX_VALUES + 1), [0] * (MAX_VALUES + 2), f"more than {MAX_VALUES} values"),
    ],
    ids=["objects", "keys", "values"],
)
def test_a_body_of_too_many_parts_is_refused_by_what_there_is_too_much_of(just, over, said):
    assert len(parsed(just)) == len(just)
    with pytest.raises(InvalidRequest, match=said):
        parsed(over)


@pytest.mark.parametrize(
    "text", [":" * 300_000, '{"a": [1, 2]}, ' * 120_000, '\\":' * 150_000], ids=["colons", "json", "quotes"]
)
def test_what_stands_in_a_text_does_not_count(text):
    assert parsed(text) == text
    assert parsed({text: text}) == {text: text}


@pytest.mark.slow
def test_too_many_keys_are_found_before_they_are_parsed():
    """A body that ends too early is refused for its keys: its end was not looked at."""
    body = json.dumps({"value": {f"key{number:07}": 1 for number in range(200_000)}}).encode()
    with pytest.raises(InvalidRequest, match="keys"):
        parse_body(Anything, body[:-2])
    with pytest.raises(InvalidRequest) as few:
        parse_body(Anything, b'{"value": {"key": 1')
    assert "keys" not in str(few.value)
