"""Actions as one line of text, for models that do not write tool calls: `click 3`, `type 4 some words`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from palestra.types.messages import FunctionCall, ToolCall

Schema = dict[str, Any]


def command_call(text: str, schemas: Iterable[Schema]) -> ToolCall | None:
    """Return the tool call of the first line that begins with a tool's name; None: there is no such line.

    Words are arguments in the order of the tool's parameters; the last parameter takes the rest of the line.

    Args:
        schemas: tools in OpenAI's shape.
    """
    tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        if (found := tools.get(name.lower())) is None:
            continue
        names = list(found.get("properties") or {})
        values = rest.strip().split(None, max(len(names) - 1, 0)) if rest.strip() else []
        arguments = json.dumps(dict(zip(names, values, strict=False)))
        return ToolCall(id="command", function=FunctionCall(name=name.lower(), arguments=arguments))
    return None


def commands_help(schemas: Iterable[Schema]) -> str:
    """Return one line per tool: its name, its parameters, and its description."""
    lines = []
    for schema in schemas:
        function = schema["function"]
        names = " ".join(name.upper() for name in function["parameters"].get("properties") or {})
        lines.append(f"{function['name']} {names}".strip() + f": {function['description']}")
    return "\n".join(lines)
