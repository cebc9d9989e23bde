"""Converts the result of an MCP tool to text for a model, or to texts and pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import orjson

from palestra.pictures.containers import OF_A_RUN, InvalidPicture, read_container


class McpToolError(Exception):
    """The tool has failed; the message is the server's text for the model."""


def tool_content(result: Mapping[str, Any], pictures: bool) -> str | list[str | bytes]:
    """Return the result of a call as text, or as a list of texts and picture files, in order.

    Adjacent texts are joined by empty lines. Unsupported parts become a line that names what was left out. Structured
    content alone becomes its JSON. `pictures`: the model is a vision-language model, and supported images stay
    pictures. Raises McpToolError: the result is an error.
    """
    given = result.get("content")
    parts = given if isinstance(given, list) else []
    if result.get("isError"):
        raise McpToolError(_joined(parts) or "the server does not say why")
    found: list[str | bytes] = []
    for file, run in groupby(parts, key=lambda part: _file(part) if pictures else None):
        alike = list(run)
        found += [_joined(alike)] if file is None else [file] * len(alike)
    if not any(found) and result.get("structuredContent") is not None:
        return orjson.dumps(result["structuredContent"]).decode()
    return found if any(isinstance(one, bytes) for one in found) else "".join(map(str, found))


def _joined(parts: Iterable[Any]) -> str:
    return "\n\n".join(map(_part, parts))


def _file(part: Any) -> bytes | None:
    """Return the file of a picture of a supported type; None: the part is something else."""
    if not isinstance(part, dict):
        return None
    if part.get("type") == "resource":
        resource = part.get("resource")
        encoded = resource.get("blob") if isinstance(resource, dict) else None
    else:
        encoded = part.get("data") if part.get("type") == "image" else None
    try:
        data = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
        read_container(data, OF_A_RUN)
    except (ValueError, InvalidPicture):
        return None
    return data


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
    """Return the decoded size of base64 text."""
    text = encoded if isinstance(encoded, str) else ""
    return f"{len(text) * 3 // 4 - text[-2:].count('='):,} bytes"


_SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "text": _text,
    "image": _left_out,
    "audio": _left_out,
    "resource_link": _link,
    "resource": _resource,
}
