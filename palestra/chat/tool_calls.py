r"""Tools in the convention of Hermes and Qwen2.5: how they are offered, called and answered in text.

Offered in the system message, called by `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>` in the assistant's
turn, answered by `<tool_response>\n…\n</tool_response>` in a user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat.json_text import object_text, read_object

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One `<tool_call>` of a reply."""

    text: str  # as written, with its tags
    name: str | None = None
    arguments: str | None = None  # JSON text of an object, as written
    problem: str | None = None  # why it can't be called; None: it can


def offer(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system message says of the tools, which are OpenAI's dicts."""
    return _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def write_call(call: Mapping[str, Any]) -> str:
    """One call, of OpenAI's shape or its `function` alone. Arguments that are a JSON object's text stand as written."""
    function = call.get("function") or call
    arguments = function.get("arguments", {})
    text = object_text(arguments) if isinstance(arguments, str) else None
    if text is None:
        text = json.dumps(arguments, ensure_ascii=False)
    return f'{_OPEN}\n{{"name": "{function["name"]}", "arguments": {text}}}\n{_CLOSE}'


def write_result(content: str) -> str:
    """One tool's answer."""
    return f"<tool_response>\n{content}\n</tool_response>"


def read_calls(text: str) -> tuple[str, list[Attempt]]:
    """A reply's content, and every call in it, in order. Calls that can't be understood stay in the content, too."""
    content: list[str] = []
    attempts: list[Attempt] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        attempt = _read_call(text, start)
        attempts.append(attempt)
        before = text[at:start]
        at = start + len(attempt.text)
        if attempt.problem is None:
            content.append(before.removesuffix("\n"))
        else:
            content.append(before + attempt.text)
    return "".join([*content, text[at:]]), attempts


def _read_call(text: str, start: int) -> Attempt:
    """The call whose opening tag is at `start`. Its JSON is read first: a string in it may hold the closing tag."""
    body = start + len(_OPEN)
    try:
        members, end = read_object(text, body)
    except ValueError as error:
        following = text.find(_OPEN, body)
        body_end = len(text) if following < 0 else following
        closing = text.find(_CLOSE, body, body_end)
        if closing < 0:
            return Attempt(text=text[start:body_end], problem="it is not closed")
        return Attempt(text=text[start : closing + len(_CLOSE)], problem=str(error))
    closing = text.find(_CLOSE, end)
    if closing < 0 or text[end:closing].strip():
        return Attempt(text=text[start:end], problem=f"{_CLOSE} is missing after the object")
    whole = text[start : closing + len(_CLOSE)]
    name = members["name"].value if "name" in members else None
    if not isinstance(name, str) or not name:
        return Attempt(text=whole, problem="it has no name")
    arguments = "{}"
    if "arguments" in members and members["arguments"].value is not None:
        given = members["arguments"]
        found = object_text(given.value if isinstance(given.value, str) else given.text)
        if found is None:
            return Attempt(text=whole, name=name, problem="its arguments are not a JSON object")
        arguments = found
    return Attempt(text=whole, name=name, arguments=arguments)
