"""What counts as the same arguments, one example each; tests/property/test_arguments.py has the oracle."""

from __future__ import annotations

import pytest

from palestra.session.arguments import arguments_key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}'),
        ('{"x": 123456789012345678901}', '{"x":123456789012345678901}'),
        ('{"x": 1.0}', '{"x": 1}'),
        ('{"x": 1e2}', '{"x": 100.0}'),
        ('{"x": 0.5}', '{"x": 5e-1}'),
        ('{"x": 1e400}', '{"x": 10E+399}'),
        ('{"x": -0}', '{"x": 0.0e99}'),
        ('{"x": "caf\\u00e9"}', '{"x": "café"}'),
        ('{"x": 1.5, "y": "\\u0031"}', '{"y": "1", "x": 15e-1}'),
        ('{"x": 2, "x": 1.5}', '{"x": 1.5}'),
        ("NaN", "NaN"),
    ],
)
def test_the_same(one, other):
    assert arguments_key(one) == arguments_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x": 123456789012345678901}', '{"x": 123456789012345678902}'),
        ('{"x": 18446744073709551616}', '{"x": 18446744073709551617}'),
        ('{"x": 0.1}', '{"x": 0.10000000000000000555}'),
        ('{"x": 1e400}', '{"x": 1e401}'),
        ('{"x": 1e999999999999999999999999}', '{"x": 1e999999999999999999999998}'),
        ('{"x": "1.5"}', '{"x": 1.5}'),
        ('{"x": "n15e-1"}', '{"x": 1.5}'),
        ('{"x": 1.5, "y": "15e-1"}', '{"x": "1.5", "y": 15e-1}'),
        ('{"sx": "n15e-1"}', '{"x": 1.5}'),
        ('{"x": 1}', '{"x": true}'),
        ('{"x": 1.5}', "{'x': 15e-1}"),
        ('{"x": [1.5, "15e-1"]}', '{"x": ["15e-1", 1.5]}'),
        ('{"x": 1.5, "y": "a, b"}', '{"x": 1.5, "y": "a", "b": null}'),
        ('["\\ud800", 1.5]', '["\\ud801", 1.5]'),
        ('{"x": 01}', '{"x": 1}'),
        ('{"x": 1.}', '{"x": 1}'),
        ('{"x": NaN}', '{"x": null}'),
        ('{"x": -1.5}', '{"x": 1.5}'),
        ('{"x": [1.5, 2.5]}', '{"x": [2.5, 1.5]}'),
    ],
)
def test_not_the_same(one, other):
    assert arguments_key(one) != arguments_key(other)


def test_digits_beyond_any_limit_are_compared_too():
    long = "9" * 10_000
    assert arguments_key(f"[{long}]") == arguments_key(f"[{long}.0]")
    assert arguments_key(f"[{long}1]") != arguments_key(f"[{long}2]")
    assert arguments_key(f"[1e{long}1]") != arguments_key(f"[1e{long}2]")


@pytest.mark.parametrize("depth", [200, 255, 1000, 2000, 100_000])
@pytest.mark.parametrize(("opening", "inner", "closing"), [("[", "", "]"), ('{"a":', "1", "}"), ('{"a":', "1.5", "}")])
def test_what_is_nested_deeply_is_compared_too(depth, opening, inner, closing):
    text = opening * depth + inner + closing * depth
    assert arguments_key(text) == arguments_key(text) != arguments_key(f"[{text}]")
