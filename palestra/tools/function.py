"""A typed Python function as a tool: the schema is made from its signature and docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from palestra.threads import call
from palestra.tools.tool import BadArguments, Tool


class FunctionTool(Tool):
    """A typed function, synchronous or asynchronous, that a model may call with arguments by name."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Create the schema of a typed function from its signature and docstring. `name` is for the model; None: the
        function's own.
        """
        self.function = function
        summary, described = _docstring(inspect.getdoc(function) or "")
        self._model = _model_of(function, described)
        schema = self._model.model_json_schema()
        schema.pop("title", None)
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
        self._schema = {
            "type": "function",
            "function": {"name": name or function.__name__, "description": summary, "parameters": schema},
        }

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function as an ordinary function."""
        return self.function(*arguments, **named)

    def get_json_schema(self) -> dict[str, Any]:
        """Return the schema in OpenAI's shape; see `Tool`."""
        return self._schema

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, converted to the types of the signature. Raises BadArguments: an argument is
        missing, unknown, or not of its type.
        """
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise BadArguments(f"{place}: {first['msg']}" if place else str(first["msg"])) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}

    async def apply_async(self, **arguments: Any) -> Any:
        """Return the result of the function: awaited, or computed in a thread if the function is synchronous."""
        return await call(partial(self.function, **arguments), "palestra-tool")


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(*, name: str | None = None) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Make a `Tool` of a typed function, which can still be called; a decorator, with or without a name.

    The docstring's first paragraph describes the tool, and its arguments section (in the style of Google, NumPy or
    Sphinx) describes each argument.

    Args:
        function: the decorated function, without parentheses.
        name: the name for the model; None: the function's own.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda function: FunctionTool(function, name)


def _model_of(function: Callable[..., Any], described: Mapping[str, str]) -> type[BaseModel]:
    """Return a model with one field for each parameter of a function."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{function.__name__}: the argument {parameter.name!r} can't be given by name")
        if parameter.name not in hints:
            raise TypeError(f"{function.__name__}: the argument {parameter.name!r} has no type")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=described.get(parameter.name)))
    return create_model(
        function.__name__, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
    )


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions of arguments by name."""
    summary = " ".join(text.partition("\n\n")[0].split())
    try:
        parameters = docstring_parser.parse(text).params
    except docstring_parser.ParseError:  # a text that only looks like one of the styles
        return summary, {}
    return summary, {found.arg_name: " ".join((found.description or "").split()) for found in parameters}
