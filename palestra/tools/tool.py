"""The base class of tools, the tool that ends an episode, and tools from typed Python functions.

The schema of a function is made from its signature and docstring.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from palestra.threads import call

FINISH = "finish"


class BadArguments(ValueError):
    """A tool's error for wrong arguments. The model reads the message and may retry."""


class Tool(ABC):
    """A function that a model may call.

    Implement `get_json_schema`, and either `apply` (which may block) or `apply_async`. The decorator `palestra.tool`
    makes a tool of a Python function.
    """

    @abstractmethod
    def get_json_schema(self) -> dict[str, Any]:
        """Return `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`, OpenAI's shape."""

    @property
    def name(self) -> str:
        """Return the name by which the model calls the tool, from its JSON schema."""
        return str(self.get_json_schema()["function"]["name"])

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check for missing and unknown arguments, and return the arguments to call the tool with.

        Args:
            arguments: as the model wrote them, parsed from JSON.

        Raises:
            BadArguments: an argument is missing or unknown. Types are checked by the tool itself.
        """
        parameters = self.get_json_schema()["function"].get("parameters") or {}
        known = set(parameters.get("properties") or {})
        if missing := [name for name in parameters.get("required") or () if name not in arguments]:
            raise BadArguments(f"the argument {missing[0]!r} is missing")
        if unknown := [name for name in arguments if name not in known]:
            raise BadArguments(f"there is no argument {unknown[0]!r}; known are {', '.join(sorted(known)) or 'none'}")
        return dict(arguments)

    def apply(self, **arguments: Any) -> Any:
        """Run the tool and return its result: text, a picture, or any value with a JSON form.

        A picture is a Pillow image, a uint8 array [height, width, 3] or the bytes of a file; a list may mix texts and
        pictures.

        It runs in a thread, so it may block; an `async def` runs on the event loop.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither apply nor apply_async")

    async def apply_async(self, **arguments: Any) -> Any:
        """Run the tool on the event loop and return its result. By default it runs `apply`."""
        return await call(partial(self.apply, **arguments), "palestra-tool")


class Finish(Tool):
    """Tool `finish(answer)`: the agent submits its answer, which ends the episode."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape, with its one argument `answer`."""
        answer = {"type": "string", "description": "The final answer."}
        return {
            "type": "function",
            "function": {
                "name": FINISH,
                "description": "Hand in the final answer and end.",
                "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """Return the argument `answer` as text. Environments read the call itself (`final_answer`), not this result."""
        return str(arguments["answer"])


class OpenTools(ABC):
    """The tools of a source while it is open."""

    @property
    @abstractmethod
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools, as of opening or the last refresh."""

    @abstractmethod
    async def refresh(self) -> bool:
        """Update the list if it has changed, and return whether it has. Raises EnvironmentFailed: the source cannot be
        reached any more.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the resources; idempotent."""


class ToolSource(ABC):
    """A source of tools that only exist during an episode; passed to `ToolManager` like tools."""

    @abstractmethod
    async def open(self) -> OpenTools:
        """Open the source for one user of its tools, such as the environment of one episode. Raises EnvironmentFailed:
        the source cannot be reached, or its tools cannot be offered to a model.
        """


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
