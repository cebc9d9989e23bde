"""What an agent needs to hand work on: a description of each kind of subagent, and the tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.tools import BadArguments, Tool

DELEGATE = "delegate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subagent:
    """One kind of subagent."""

    name: str  # of the kind; the first of an agent named `agent` is `agent/NAME-1`
    description: str = ""  # what it is for, as the agent reads it that may delegate to it
    system: str | None = None  # the system message of its conversation; None: none
    tools: tuple[Tool, ...] = ()  # its own
    max_steps: int = 8  # of its own; then what it said last is its result

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ValueError: the name is empty or has a slash, or it may make no step.
        """
        if not self.name or "/" in self.name:
            raise ValueError(f"a subagent's name has a letter and no slash, and is not {self.name!r}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps of {self.name!r} is at least 1")


class Delegate(Tool):
    """`delegate(prompt, kind)`: one call starts one subagent; several calls of a turn start several at once."""

    def __init__(self, kinds: Mapping[str, Subagent], start: Callable[[Subagent, str], str]) -> None:
        """`start` gets the kind and the prompt; what it returns is the result of the call."""
        self._kinds, self._start = kinds, start

    def get_json_schema(self) -> dict[str, Any]:
        """See `Tool`. Where there is one kind only, `kind` may be left out."""
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
        """Start it.

        Raises:
            BadArguments: there is no such kind, or nothing is asked.
        """
        name = arguments.get("kind", next(iter(self._kinds), ""))
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise BadArguments(f"there is no subagent {name!r}; known are {', '.join(self._kinds) or 'none'}")
        prompt = arguments["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadArguments("the prompt is no text, or an empty one")
        return self._start(kind, prompt)
