"""What a tool is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from palestra.threads import call


class BadArguments(ValueError):
    """Arguments that a tool can't be called with; the message is for the model."""


class Tool(ABC):
    """A function that a model may call. Implement `get_json_schema`, and `apply` or `apply_async`."""

    @abstractmethod
    def get_json_schema(self) -> dict[str, Any]:
        """OpenAI's shape: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.get_json_schema()["function"]["name"])

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to call it with.

        Raises:
            BadArguments: one is missing, or not known. Types are the tool's own matter.
        """
        parameters = self.get_json_schema()["function"].get("parameters") or {}
        known = set(parameters.get("properties") or {})
        if missing := [name for name in parameters.get("required") or () if name not in arguments]:
            raise BadArguments(f"the argument {missing[0]!r} is missing")
        if unknown := [name for name in arguments if name not in known]:
            raise BadArguments(f"there is no argument {unknown[0]!r}; known are {', '.join(sorted(known)) or 'none'}")
        return dict(arguments)

    def apply(self, **arguments: Any) -> Any:
        """Return the result of a call; blocks in a thread of its own, or runs on the event loop if `async`."""
        raise NotImplementedError(f"{type(self).__name__} has neither apply nor apply_async")

    async def apply_async(self, **arguments: Any) -> Any:
        """Return the result of a call, on the event loop. Unless it is overridden, `apply` does the work."""
        return await call(partial(self.apply, **arguments), "palestra-tool")
