from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tools import BadArguments
from palestra.tools.calculator import evaluate_expression


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(17 + 4) * 3", 63),
        ("-2 ** 2", -4),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("1 / 4", 0.25),
        ("3 × 4", 12),
    ],
)
def test_arithmetic_is_that_of_python(expression, value):
    assert evaluate_expression(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "__import__('os')",
        "1 if 1 else 2",
        "'a' * 3",
        "True",
        "1j",
        "9 ** 9 ** 9",
        "2 ** 100000",
        "1 / 0",
        "1e308 * 10",
        "1 +",
        "[1][0]",
        "(-1) ** 0.5",
        "1" * 1001,
    ],
)
def test_anything_else_is_refused_with_words(expression):
    with pytest.raises(BadArguments, match=r"\w"):
        evaluate_expression(expression)


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=30))
def test_no_text_does_anything_else_than_give_a_number_or_be_refused(text):
    with contextlib.suppress(BadArguments):
        assert isinstance(evaluate_expression(text), int | float)
