"""A typed Python function as a tool: the schema is made from its signature and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from palestra.threads import call
from palestra.tools.tool import BadArguments, Tool

_ARGUMENT = re.compile(r"^\s{2,}(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


class FunctionTool(Tool):
    """A function, synchronous or not, that a model may call."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        """`name` is what the model calls it; None: the function's own.

        Raises:
            TypeError: an argument has no type, or can't be given by name.
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
        """The function itself."""
        return self.function(*arguments, **named)

    def get_json_schema(self) -> dict[str, Any]:
        """See `Tool`."""
        return self._schema

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the types of the signature.

        Raises:
            BadArguments: one is missing, not known, or not of its type.
        """
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise BadArguments(f"{place}: {first['msg']}" if place else str(first["msg"])) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}

    async def apply_async(self, **arguments: Any) -> Any:
        """Await the function, or run it in a thread."""
        return await call(partial(self.function, **arguments), "palestra-tool")


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(*, name: str | None = None) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Decorator: a typed function becomes a `Tool`, and can still be called.

    The docstring's first paragraph is the description; its `Args:` section describes the arguments.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda function: FunctionTool(function, name)


def _model_of(function: Callable[..., Any], described: Mapping[str, str]) -> type[BaseModel]:
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
    """First paragraph, and the descriptions in a section `Args:` (Google's style), by argument."""
    summary = " ".join(text.partition("\n\n")[0].split())
    described: dict[str, str] = {}
    name = None
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = line.strip() in ("Args:", "Arguments:", "Parameters:") if line.strip() else inside
            continue
        if not inside:
            continue
        if match := _ARGUMENT.match(line):
            name = match[1]
            described[name] = match[2].strip()
        elif name is not None and line.strip():
            described[name] += " " + line.strip()
    return summary, described
