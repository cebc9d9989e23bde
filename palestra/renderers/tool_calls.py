"""Tool calls in the convention of Hermes and Qwen2.5: how tools are offered, called and answered in text.

Arguments stay as the model wrote them: parsing and printing JSON may change the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from palestra.renderers.base import Attempt, Tools
from palestra.renderers.reply_grammar import CallFormat
from palestra.types.messages import ToolCall

_SPACE = " \t\r\n"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>\n", "\n</tool_response>"  # what stands before the result of a tool, and behind it
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


@dataclass(frozen=True, slots=True)
class JsonMember:
    """A value of a JSON object, and its source text."""

    value: Any
    text: str


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_object(text: str, at: int = 0) -> tuple[dict[str, JsonMember], int]:
    """Parse the JSON object at a position of a text, after white space; return its members and the index after it.

    Of equal keys the last one counts.
    """
    at = _expect(text, at, "{")
    members: dict[str, JsonMember] = {}
    if _next(text, at) == "}":
        return members, _expect(text, at, "}")
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError(f"a key is missing at character {at}")
        start = _skip(text, _expect(text, at, ":"))
        value, at = _value(text, start)
        members[key] = JsonMember(value, text[start:at])
        if _next(text, at) == "}":
            return members, _expect(text, at, "}")
        at = _expect(text, at, ",")


def object_text(text: str) -> str | None:
    """Return `text` without white space around it if it is a JSON object, else None."""
    try:
        end = read_object(text)[1]
    except ValueError:
        return None
    return None if text[end:].strip(_SPACE) else text.strip(_SPACE)


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, _skip(text, at))
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _next(text: str, at: int) -> str:
    at = _skip(text, at)
    return text[at : at + 1]


def _expect(text: str, at: int, wanted: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != wanted:
        raise ValueError(f"{wanted!r} is missing at character {at}")
    return at + 1


def offer(tools: Tools) -> str:
    """Return the text of the system message that offers the tools."""
    return _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def write_call(call: ToolCall) -> str:
    """Return a call as text. Arguments that are a JSON object are unchanged; others become a string."""
    written = call.function.arguments
    arguments = object_text(written)
    if arguments is None:
        arguments = json.dumps(written, ensure_ascii=False)
    return f'{OPEN}\n{{"name": "{call.function.name}", "arguments": {arguments}}}\n{CLOSE}'


def call_format(added: Mapping[str, int]) -> CallFormat:
    """Return the format of `write_call`, whose tags may be added tokens of the tokenizer."""
    opening, closing = added.get(OPEN, OPEN), added.get(CLOSE, CLOSE)
    before, after = (opening, '\n{"name": "'), ("}\n", closing)
    return CallFormat(
        before_name=before,
        before_arguments=('", "arguments": ',),
        between=(*after, "\n", *before),
        closing=after,
        quoted=True,
    )


def read_calls(text: str) -> tuple[str, list[Attempt]]:
    """Return a reply's content and its calls, in order. Malformed calls stay in the content."""
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
    """Return the call whose opening tag is at `start`, by its JSON: a string may contain the closing tag."""
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
