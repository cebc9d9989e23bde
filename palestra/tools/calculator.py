"""Tool `calculator`: arithmetic on numbers, without `eval`, because the expression is written by a model."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from palestra.tools.tool import BadArguments, Tool

Number = int | float
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_CHARS = 1000
_MAX_BITS = 4096  # bits of an integer result: without a limit, 9 ** 9 ** 9 would take all memory


class Calculator(Tool):
    """Tool `calculator(expression)`: evaluates + - * / // ** and parentheses."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape, with its one argument `expression`."""
        expression = {"type": "string", "description": "For example `(17 + 4) * 3`."}
        return {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluate an arithmetic expression.",
                "parameters": {"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """Return the value of `expression` as text; a float without a fraction is written as an integer. Raises
        BadArguments: the text is not an arithmetic expression, or the value is too large.
        """
        value = evaluate_expression(str(arguments["expression"]))
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        return str(int(value) if whole else value)


def evaluate_expression(expression: str) -> Number:
    """Return the value of an arithmetic expression of at most 1,000 characters.

    It may contain numbers, + - * / // **, parentheses, and `×` and `÷`. Raises BadArguments: the text is not an
    arithmetic expression, or its value is not finite or too large.
    """
    if len(expression) > _MAX_CHARS:
        raise BadArguments(f"an expression has at most {_MAX_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("×", "*").replace("÷", "/"), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadArguments):
            raise
        raise BadArguments(f"{expression!r} is not an arithmetic expression") from None
    except (ArithmeticError, TypeError) as error:
        raise BadArguments(f"{expression!r} has no value: {error}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise BadArguments(f"{expression!r} is too large")
    return value


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        whole = isinstance(left, int) and isinstance(right, int)
        # The size is estimated before the power is computed: afterwards would be too late for memory.
        # The size is estimated before the power is computed: afterwards would be too late for memory.
        if isinstance(node.op, ast.Pow) and whole and abs(int(left)).bit_length() * max(right, 0) > _MAX_BITS:
            raise BadArguments("the result is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise BadArguments("only numbers, + - * / // % ** and parentheses are allowed")


def _bounded(value: Any) -> Number:
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        raise BadArguments("the result is too large, or not a real number")
    number: Number = value
    return number
