"""What a tool of an MCP server returns, as the text that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson


class McpToolError(Exception):
    """The tool has failed; the message is what the server says for the model."""


def text_of(result: Mapping[str, Any]) -> str:
    """Return the result of a call as text.

    Parts of text are joined by empty lines. What is no text, such as an image, becomes a line that says what was left
    out. A result of structured content alone becomes its JSON.

    Args:
        result: of `tools/call`.

    Raises:
        McpToolError: the result says that it is an error.
    """
    parts = result.get("content")
    said = "\n\n".join(map(_part, parts)) if isinstance(parts, list) else ""
    if result.get("isError"):
        raise McpToolError(said or "the server does not say why")
    if not said and result.get("structuredContent") is not None:
        return orjson.dumps(result["structuredContent"]).decode()
    return said


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    shown = _SHOWN.get(kind) if isinstance(kind, str) else None
    return shown(part) if shown is not None else f"[a part of the kind {kind!r}, which can't be shown]"


def _text(part: Mapping[str, Any]) -> str:
    return str(part.get("text", ""))


def _left_out(part: Mapping[str, Any]) -> str:
    return f"[{part.get('type')} of {part.get('mimeType')}, {_size(part.get('data'))}, which can't be shown]"


def _link(part: Mapping[str, Any]) -> str:
    about = f": {part['description']}" if part.get("description") else ""
    return f"[resource {part.get('name')} at {part.get('uri')}{about}]"


def _resource(part: Mapping[str, Any]) -> str:
    found = part.get("resource")
    resource = found if isinstance(found, dict) else {}
    if isinstance(resource.get("text"), str):
        return f"[resource {resource.get('uri')}]\n{resource['text']}"
    size = _size(resource.get("blob"))
    return f"[resource {resource.get('uri')} of {resource.get('mimeType')}, {size}, which can't be shown]"


def _size(encoded: Any) -> str:
    """Return the size of what base64 encodes."""
    text = encoded if isinstance(encoded, str) else ""
    return f"{len(text) * 3 // 4 - text[-2:].count('='):,} bytes"


_SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "text": _text,
    "image": _left_out,
    "audio": _left_out,
    "resource_link": _link,
    "resource": _resource,
}
