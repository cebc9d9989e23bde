"""The actions that `check_environment` plays in place of an agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.schemas.messages import ChatMessage, FunctionCall, TextPart, ToolCall, text_message
from palestra.tools import FINISH

TEXTS = ("", "hello", "1", '{"x": 1}', "é 漢 👩‍💻", "\ud800", "x" * 10_000)
_VALUES: dict[str, Any] = {"string": "1 + 1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}

Task = Mapping[str, Any]
Script = Callable[[int, Sequence[Mapping[str, Any]]], ChatMessage]
"""(number of actions that the agent has taken, tools that the agent is offered) -> the agent's next action."""


def scripts(tasks: Sequence[Task], actions: Sequence[str | ChatMessage] | None) -> list[tuple[Task, Script]]:
    """Return the episodes to play, each as a task and the script of its actions.

    Without `actions` the first task is played once for each kind of action, beginning with that kind.
    """
    if actions is not None:
        return [(task, _repeated([_message(action) for action in actions])) for task in tasks]
    kinds = len(TEXTS) + len(_calls([], 0))
    first = [(tasks[0], _rotated(start)) for start in range(kinds)]
    return first + [(task, _rotated(start)) for start, task in enumerate(tasks[1:], start=1)]


def _message(action: str | ChatMessage) -> ChatMessage:
    """Return the action as a message; text with a lone surrogate gets `?` in its place, as in a model's reply."""
    return text_message("assistant", action) if isinstance(action, str) else action


def _repeated(actions: Sequence[ChatMessage]) -> Script:
    return lambda number, tools: actions[number % len(actions)]


def _rotated(start: int) -> Script:
    def action(number: int, tools: Sequence[Mapping[str, Any]]) -> ChatMessage:
        choices: list[ChatMessage] = [*(_calls(tools, number) if tools else ()), *map(_message, TEXTS)]
        return choices[(start + number) % len(choices)]

    return action


def _calls(tools: Sequence[Mapping[str, Any]], number: int) -> list[ChatMessage]:
    """Return actions that call: without arguments, with text that is not JSON, an unknown tool, and correctly."""
    names = [str(tool["function"]["name"]) for tool in tools]
    good = [(name, _arguments(tool)) for name, tool in zip(names, tools, strict=True) if name != FINISH]
    turns = [
        [(name, "{}") for name in names],
        [(name, '{"x": ') for name in names[:1]],
        [("no_such_tool", "{}")],
        good or [("no_such_tool", "{}")],
    ]
    return [_calling(turn, f"call_{number}") for turn in turns]


def _calling(turn: Sequence[tuple[str, str]], ids: str) -> ChatMessage:
    calls = [
        ToolCall(id=f"{ids}_{place}", function=FunctionCall(name=name, arguments=arguments))
        for place, (name, arguments) in enumerate(turn)
    ]
    return ChatMessage(role="assistant", content=(TextPart(text=""),), tool_calls=tuple(calls))


def _arguments(tool: Mapping[str, Any]) -> str:
    properties = (tool["function"].get("parameters") or {}).get("properties") or {}
    return json.dumps({name: _value(schema) for name, schema in properties.items()})


def _value(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    return schema["enum"][0] if schema.get("enum") else _VALUES.get(kind) if isinstance(kind, str) else None
