r"""The text form of tools in the convention of Hermes and Qwen2.5: how they are offered, called and answered.

Tools are offered in the system message, called by `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>` in the
assistant's turn, and answered by `<tool_response>\n…\n</tool_response>` in a turn of the user.
"""

from __future__ import annotations

import json

from palestra.chat.base import Attempt, Tools
from palestra.chat.json_text import object_text, read_object
from palestra.schemas.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
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


def offer(tools: Tools) -> str:
    """Return the text in the system message that offers the tools."""
    return _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def write_call(call: ToolCall) -> str:
    """Return a call as text. Arguments that are a JSON object are written as they are; others become a string."""
    written = call.function.arguments
    arguments = object_text(written)
    if arguments is None:
        arguments = json.dumps(written, ensure_ascii=False)
    return f'{OPEN}\n{{"name": "{call.function.name}", "arguments": {arguments}}}\n{CLOSE}'


def grammar_of_calls(tools: Tools, most_calls: int) -> str:
    """Return rules for `llguidance`; the rule `calls` matches one to `most_calls` calls of these tools."""
    functions = [tool["function"] for tool in tools]
    rules = ["calls: call\n" if most_calls == 1 else f'calls: call ("\\n" call){{0,{most_calls - 1}}}\n']
    rules.append("call: " + " | ".join(f"call_{k}" for k in range(len(functions))) + "\n")
    for k, function in enumerate(functions):
        head = json.dumps(f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        parameters = {"type": "object"} | (function.get("parameters") or {})
        if "properties" in parameters:  # a small model would invent more until its limit
            parameters = {"additionalProperties": False} | parameters
        rules.append(f'call_{k}: {head} arguments_{k} "}}\\n{CLOSE}"\n')
        rules.append(f"arguments_{k}: %json {json.dumps(parameters)}\n")
    return "".join(rules)


def write_result(content: str) -> str:
    """Return the result of one tool as text."""
    return f"<tool_response>\n{content}\n</tool_response>"


def read_calls(text: str) -> tuple[str, list[Attempt]]:
    """Return a reply's content and its calls, in order. The text of a malformed call stays in the content."""
    content: list[str] = []
    attempts: list[Attempt] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
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
    """Return the call whose opening tag is at `start`.

    Its JSON is parsed first, because a string may hold the closing tag.
    """
    body = start + len(OPEN)
    try:
        members, end = read_object(text, body)
    except ValueError as error:
        following = text.find(OPEN, body)
        body_end = len(text) if following < 0 else following
        closing = text.find(CLOSE, body, body_end)
        if closing < 0:
            return Attempt(text=text[start:body_end], problem="it is not closed")
        return Attempt(text=text[start : closing + len(CLOSE)], problem=str(error))
    closing = text.find(CLOSE, end)
    if closing < 0 or text[end:closing].strip():
        return Attempt(text=text[start:end], problem=f"{CLOSE} is missing after the object")
    whole = text[start : closing + len(CLOSE)]
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
