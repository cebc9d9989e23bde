"""What an agent needs to hand work on: a description of each kind of subagent, and the tool `delegate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.tools import BadArguments, Tool

DELEGATE = "delegate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subagent:
    """One kind of subagent that an agent may start, any number of times, with the tool `delegate`."""

    name: str  # of the kind; the first that an agent named `agent` starts is `agent/NAME-1`
    description: str = ""  # its purpose, shown to agents that may delegate to it
    system: str | None = None  # system message of its conversation, if any
    tools: tuple[Tool, ...] = ()  # tools that it may call, beside `finish` and `delegate`
    max_steps: int = 8  # replies that it may make; its last text is then its result

    def __post_init__(self) -> None:
        """Check the name and the limit.

        Raises:
            ValueError: the name is empty or has a slash, or `max_steps` is below 1.
        """
        if not self.name or "/" in self.name:
            raise ValueError(f"a subagent's name has a letter and no slash, and is not {self.name!r}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps of {self.name!r} is at least 1")


class Delegate(Tool):
    """Tool `delegate(prompt, kind)`: one call starts one subagent; the calls of one reply start theirs concurrently."""

    def __init__(self, kinds: Mapping[str, Subagent], start: Callable[[Subagent, str], str]) -> None:
        """Create the tool of one agent.

        Args:
            kinds: kinds of subagents by name.
            start: called with the kind and the prompt; returns the result of the call, as the agent reads it.
        """
        self._kinds, self._start = kinds, start

    def get_json_schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape. The argument `kind` is optional if there is only one kind."""
        about = " ".join(f"{kind.name}: {kind.description}" for kind in self._kinds.values() if kind.description)
        several = len(self._kinds) > 1
        properties = {
            "prompt": {"type": "string", "description": "All that it has to know."},
            "kind": {"type": "string", "enum": list(self._kinds)} | ({"description": about} if about else {}),
        }
        return {
            "type": "function",
            "function": {
                "name": DELEGATE,
                "description": "Hand a part of the task to a subagent. Several calls at once run side by side.",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": ["prompt", "kind"] if several else ["prompt"],
                },
            },
        }

    async def apply_async(self, **arguments: Any) -> str:
        """Start a subagent and return what the agent reads as the result of the call.

        Raises:
            BadArguments: there is no such kind, or the prompt is empty.
        """
        name = arguments.get("kind", next(iter(self._kinds), ""))
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise BadArguments(f"there is no subagent {name!r}; known are {', '.join(self._kinds) or 'none'}")
        prompt = arguments["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadArguments("the prompt is no text, or an empty one")
        return self._start(kind, prompt)
