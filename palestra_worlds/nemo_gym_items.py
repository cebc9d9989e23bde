"""Conversions between chat messages and items of OpenAI's Responses API, which NeMo Gym uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from palestra.errors import InvalidEnvironment
from palestra.types.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message

_TEXTS = ("input_text", "output_text", "text")


def conversation_of(asked: Mapping[str, Any], system: str | None) -> tuple[ChatMessage, ...]:
    """Return the initial messages of an episode from a task's `responses_create_params`.

    Args:
        system: a system message before all others; None: the task's own, if it has one.
    """
    given = asked["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise InvalidEnvironment("the task's `input` is neither a text nor a list of items")
    found = [_message_of(item) for item in items]
    if system is None and isinstance(asked.get("instructions"), str):
        system = asked["instructions"]
    return (*(() if system is None else (text_message("system", system),)), *found)


def tools_of(given: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return tools in the shape of the chat API, from the Responses API's."""
    found = []
    for tool in given:
        if tool.get("type") != "function":
            raise InvalidEnvironment(
                f"the task has a tool of the kind {tool.get('type')!r}; only functions can be called"
            )
        named = {"name": tool["name"], "description": tool.get("description") or ""}
        found.append({"type": "function", "function": {**named, "parameters": tool.get("parameters") or {}}})
    return tuple(found)


def reply_items(action: ChatMessage, number: int) -> list[dict[str, Any]]:
    """Return an agent's reply as items: its text, then its calls.

    Args:
        number: makes the items' ids unique in the episode.
    """
    items: list[dict[str, Any]] = []
    if action.text or not action.tool_calls:
        content = [{"type": "output_text", "text": action.text, "annotations": []}]
        said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**said, "content": content})
    for place, call in enumerate(action.tool_calls):
        items.append(
            {
                "id": f"fc_{number}_{place}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
        )
    return items


def tool_output(result: ChatMessage, number: int) -> dict[str, Any]:
    """Return the result of a tool as an item.

    Args:
        number: makes the item's id unique in the episode.
    """
    said = {"type": "function_call_output", "call_id": result.tool_call_id, "output": result.text}
    return {"id": f"fco_{number}", **said, "status": "completed"}


def _message_of(item: Any) -> ChatMessage:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return text_message(item["role"], _text_of(item.get("content")))
    if kind == "function_call":
        function = FunctionCall(name=item["name"], arguments=item["arguments"])
        return ChatMessage(role="assistant", tool_calls=(ToolCall(id=item["call_id"], function=function),))
    if kind == "function_call_output":
        text = TextPart(text=_text_of(item.get("output")))
        return ChatMessage(role="tool", content=(text,), tool_call_id=item["call_id"])
    raise InvalidEnvironment(f"the task's `input` has an item of the kind {kind!r}, which can't be shown")


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidEnvironment(f"the task's `input` has a part of the kind {kind!r}; only text can be shown")
    return "".join(part["text"] for part in parts)
