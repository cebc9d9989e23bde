"""Filters answers that scorers of reasoning-gym evaluate as Python: only harmless ones reach them.

`countdown` and others call `eval` or sympy's `parse_expr` with a model's text, in the job's process. An answer that
could do more than state numbers or a list scores 0, without being evaluated.
"""

from __future__ import annotations

import re

LONGEST = 2000  # characters
_ARITHMETIC = re.compile(r"[-+*/().\d\s]*")
_LIST = re.compile(r"[-\[\],'\"\w\s.|]*")
_FORMULA = re.compile(r"[-+*/()^.,\w\s]*")
_NAME = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = {
    "log",
    "ln",
    "sqrt",
    "exp",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "pi",
    "Integral",
}
# What may follow `**` or `^`: a small number, a letter, or a small fraction; towers of powers do not end.
_POWER = re.compile(
    r"(?:\*\*|\^)\s*(?:-?\d{1,2}|[a-zA-Z]|\(\s*-?\s*(?:\d{0,2}\s*\*?\s*[a-zA-Z]|\d{1,2}(?:\s*/\s*\d{1,2})?)\s*\))(?![\w.]|\s*(?:\*\*|\^))"
)
_BY_DATASET = {
    **dict.fromkeys(("countdown", "puzzle24"), "arithmetic"),
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), "list"),
    **dict.fromkeys(("simple_integration", "intermediate_integration", "polynomial_multiplication"), "formula"),
}


def may_be_scored(dataset: str, answer: str) -> bool:
    """Return whether an answer may reach the scorer of a data set."""
    kind = _BY_DATASET.get(dataset)
    if kind is None:
        return True
    if len(answer) > LONGEST:
        return False
    if kind == "arithmetic":
        return _ARITHMETIC.fullmatch(answer) is not None and "**" not in answer
    if kind == "list":  # without parentheses nothing is called; a comprehension may take for ever
        return _LIST.fullmatch(answer) is not None and re.search(r"\bfor\b|\.\s*[^\W\d]", answer) is None
    return _is_formula(answer)


def _is_formula(answer: str) -> bool:
    names = _NAME.findall(re.sub(r"(?<=\d)(?=[^\W\d])", " ", answer))  # 2x is 2 times x
    return (
        _FORMULA.fullmatch(answer) is not None
        and all(len(name) == 1 or name in _FUNCTIONS for name in names)
        and re.search(r"\.\s*[^\W\d]", answer) is None  # no attribute
        and len(re.findall(r"\*\*|\^", answer)) == len(_POWER.findall(answer))
        and len(re.findall(r"\)\s*(?:\*\*|\^)", answer)) <= 2  # powers of powers
    )
