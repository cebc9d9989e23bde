"""The base class of tools, and the tool that ends an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

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
